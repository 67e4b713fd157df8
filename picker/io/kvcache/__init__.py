"""What makes `kvcache-aware` work: sources of what engines hold, tokens of requests, and who asks for both."""
