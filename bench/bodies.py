"""Chat requests as they come: many conversations share a beginning, no two are the same."""

from __future__ import annotations

import random

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
_BEGINNINGS = 64
_ALPHABET = "etaoin shrdlu cmfwyp vbgkqjxz, ETAOIN. 0123456789"


class Bodies:
    """Makes chat bodies of exactly `size` bytes. Half of each is one of 64 system prompts, the rest is new."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        rng = self._rng = random.Random(seed)
        self._text = "".join(rng.choices(_ALPHABET, k=1 << 20)).encode()
        head = b'{"model":"%b","max_tokens":64,"messages":[{"role":"system","content":"' % MODEL.encode()
        middle = b'"},{"role":"user","content":"'
        self._tail = b'"}]}'
        shared = size // 2 - len(head)
        self._beginnings = [head + self._slice(shared) + middle for _ in range(_BEGINNINGS)]
        self._unique = size - len(self._beginnings[0]) - len(self._tail)

    def next(self) -> bytes:
        return self._beginnings[int(self._rng.random() * _BEGINNINGS)] + self._slice(self._unique) + self._tail

    def _slice(self, size: int) -> bytes:
        start = int(self._rng.random() * (len(self._text) - size))
        return self._text[start : start + size]
