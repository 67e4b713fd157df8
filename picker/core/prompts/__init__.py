"""From the bytes of a request to the text whose prefix an engine may hold."""

from picker.core.prompts.parse import Prompt, Unused, parse

__all__ = ["Prompt", "Unused", "parse"]
