"""What engines publish about their KV caches, as values, whatever release they are."""
