"""Usage of tokens, read from responses while they pass."""

from picker.core.usage.usage import Usage

__all__ = ["Usage"]
