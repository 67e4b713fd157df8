"""Which engine holds which token block, learnt from KV events, and how many tokens of a prompt are cached where."""
