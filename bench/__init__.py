"""Benchmarks of the request path, against its budgets: `python -m bench`."""
