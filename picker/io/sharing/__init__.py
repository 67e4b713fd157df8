"""Picks shared with other pickers, through Redis."""
