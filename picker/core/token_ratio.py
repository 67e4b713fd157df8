"""How many bytes of text a token has, for each model: what engines report, against what they were sent."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT = 4.0
"""Bytes per token of English text, for most tokenizers."""
_LEAST, _MOST = 0.5, 64.0
_WEIGHT = 0.05
_MOST_MODELS = 1000
_TELLING_TOKENS = 32
"""A shorter prompt is mostly chat template, which our text does not have."""


class TokenRatio:
    """A moving average for each model; at most `_MOST_MODELS` of them, further ones have the default."""

    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    @property
    def known(self) -> Mapping[str, float]:
        """Bytes per token of the models whose prompts engines counted."""
        return self._ratios

    def of(self, model: str) -> float:
        """Bytes per token of prompts to this model."""
        return self._ratios.get(model, DEFAULT)

    def learn(self, model: str, size: int, tokens: int) -> None:
        """An engine counted so many tokens in a prompt whose text has so many bytes."""
        if tokens < _TELLING_TOKENS or not size:
            return
        ratio = min(max(size / tokens, _LEAST), _MOST)
        known = self._ratios.get(model)
        if known is not None:
            self._ratios[model] = known + (ratio - known) * _WEIGHT
        elif len(self._ratios) < _MOST_MODELS:
            self._ratios[model] = ratio
