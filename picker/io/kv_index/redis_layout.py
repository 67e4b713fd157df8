"""What stands in Redis for the blocks of one engine, in Kthena's layout.

matrix:kv:block:{model}@{standardized hash}   HASH: {pod}.{namespace} -> Unix seconds, or `seconds|medium`
vllm:kv:block:{pod}.{namespace}@{engine hash} the standardized hash; ends by itself after a day
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from picker.core.kv_index.owners import BLOCK_PREFIX, block_key
from picker.core.kv_index.ownership import Holding, Ownership
from picker.io.kv_index.redis_connection import Command

MAPPING_SECONDS = 86_400
_INT64 = 1 << 63

Block = tuple[str, int]
"""Model and hash."""


class Layout:
    """The commands that make Redis say how things are. `owner`, `engine`: see `RedisWriter`; `media`: values name it."""

    def __init__(self, ownership: Ownership, owner: str, engine: str, *, media: bool) -> None:
        self.owner = owner
        self._ownership = ownership
        self._engine = engine
        self._media = media

    def held(self) -> Iterator[Block]:
        """Go through all owned blocks. They may change meanwhile: new ones are left out, and some may be gone."""
        for model in self._ownership.models:
            for block in [block for block, _ in self._ownership.holdings(model)]:
                yield model, block

    def value(self, block: Block) -> str | None:
        """Return what an ownership says; None: there is none."""
        holding = self._ownership.holding(*block)
        return None if holding is None else self._text(holding)

    def block(self, block: Block) -> Command:
        """Return what writes or deletes the ownership of a block."""
        value = self.value(block)
        return self.disowned(block) if value is None else ("HSET", block_key(*block), self.owner, value)

    def disowned(self, block: Block) -> Command:
        """Return what deletes the ownership of a block."""
        return ("HDEL", block_key(*block), self.owner)

    def mapping(self, name: int) -> Command:
        """Return what writes or deletes the meaning of an engine's block."""
        standard = self._ownership.standard_hash(name)
        return (
            self.unmapped(name) if standard is None else ("SET", self._key(name), str(standard), "EX", MAPPING_SECONDS)
        )

    def unmapped(self, name: int) -> Command:
        """Return what deletes the meaning of an engine's block."""
        return ("DEL", self._key(name))

    def false_ones(self, keys: Iterable[bytes]) -> list[Command]:
        """Return what deletes our ownership of those blocks that we do not own."""
        return [("HDEL", key, self.owner) for key in keys if not self._is_held(key)]

    def _text(self, holding: Holding) -> str:
        return f"{holding.stored_at}|{holding.medium}" if self._media else str(holding.stored_at)

    def _is_held(self, key: bytes) -> bool:
        model, _, block = key.decode("utf-8", "replace").removeprefix(BLOCK_PREFIX).rpartition("@")
        if not block.isascii() or not block.isdecimal() or len(block) > 20 or str(int(block)) != block:
            return False
        return self._ownership.holding(model, int(block)) is not None

    def _key(self, name: int) -> str:
        """Return the key of an engine's block; SGLang writes its hashes as signed integers."""
        signed = name - 2 * _INT64 if self._engine == "sglang" and name >= _INT64 else name
        return f"{self._engine}:kv:block:{self.owner}@{signed}"
