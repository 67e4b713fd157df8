"""Request bodies."""

from __future__ import annotations

import json
import random
from typing import Any


def chat(text: str, **fields: Any) -> bytes:
    """A chat request with one message."""
    return json.dumps({"model": "sim", "messages": [{"role": "user", "content": text}], **fields}).encode()


def chat_of(size: int, seed: int = 0) -> bytes:
    """A chat request of exactly so many bytes, unlike those of other seeds; filler where that is too short for one."""
    frame = len(chat(""))
    if size < frame:
        return b"x" * size
    return chat(random.Random(seed).randbytes((size - frame + 1) // 2).hex()[: size - frame])
