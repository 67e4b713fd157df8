"""From the bytes of a request to the text whose prefix an engine may hold."""

from picker.core.prompts.fields import Prompt, Unused
from picker.core.prompts.parse import parse

__all__ = ["Prompt", "Unused", "parse"]
