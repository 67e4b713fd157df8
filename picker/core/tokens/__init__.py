"""Prompts as token ids: what to tokenize in a request, how engines read a chat, and which texts tokenize alone."""
