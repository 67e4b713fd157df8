"""Usage of tokens, read from responses while they pass."""

from picker.core.usage.reader import UsageReader
from picker.core.usage.usage import Drop, Usage

__all__ = ["Drop", "Usage", "UsageReader"]
