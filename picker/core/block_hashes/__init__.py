"""The names that others give to blocks of tokens, so that an index can be filled and queried by their keys."""
