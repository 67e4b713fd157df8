"""A prompt as an engine's prefix cache sees it."""

from __future__ import annotations

from collections.abc import Sequence

from picker.core.block_index.chains import Chain, KeyChains
from picker.core.block_index.keys import Media, pack, prompt_suffixes, root_key


class Prompt:
    """Tokens and what else decides which blocks they may hit. Key chains are computed when first asked for.

    `reads_cache` is False for requests that the engine answers without reading its cache (`prompt_logprobs`).
    """

    __slots__ = ("_adapter", "_cache_salt", "_chains", "_data", "_found", "_media", "_model", "reads_cache", "tokens")

    def __init__(
        self,
        chains: KeyChains,
        model: str,
        tokens: Sequence[int],
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        media: Sequence[Media] = (),
        reads_cache: bool = True,
    ) -> None:
        self.reads_cache = reads_cache
        self.tokens = len(tokens)
        self._chains = chains
        self._model = model
        self._data = pack(tokens)
        self._adapter = adapter
        self._cache_salt = cache_salt
        self._media = media
        self._found: dict[int, Chain] = {}

    def usable(self, block_size: int) -> int:
        """Return how many blocks can be hit at most: the last token is always computed."""
        return max(self.tokens - 1, 0) // block_size

    def chain(self, block_size: int) -> Chain:
        """Return the keys of all whole blocks of this size."""
        chain = self._found.get(block_size)
        if chain is None:
            root = root_key(self._model, self._adapter, block_size)
            suffixes = prompt_suffixes(self._media, self._cache_salt, block_size)
            chain = self._found[block_size] = self._chains.chain(root, self._data, block_size, suffixes)
        return chain
