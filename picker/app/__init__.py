"""Wiring: configuration, the command line, start, reload and drain."""
