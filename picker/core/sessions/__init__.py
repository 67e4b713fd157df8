"""Which conversation lives where: identity from content, and an index of how much of it each endpoint holds."""
