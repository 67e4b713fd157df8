"""What routers call an engine's blocks: by model, and by the hash of a protocol."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.kthena import standardized
from picker.core.block_hashes.llm_d import Chain
from picker.core.block_hashes.registry import HASH_PROTOCOLS, HashName
from picker.core.kv_index.engine_blocks import Following, Meaning, Prompt

_ANY = HashContext()


class Naming:
    """Names the blocks of an engine. `following` is there for protocols whose hashes are chained."""

    def __init__(self, model: str, protocol: HashName, seed: str) -> None:
        self._model = model
        self._protocol = HASH_PROTOCOLS[protocol]
        chain = self._protocol.chain
        self.following: Following | None = None if chain is None else _follower(chain, seed, model)

    def key(self, name: int, meaning: Meaning) -> tuple[str, int] | None:
        """Return model and hash of a block by the engine's name and meaning of it; None if nobody may go by them."""
        prompt, protocol = meaning.prompt, self._protocol
        if self.why_not(meaning):
            return None
        if protocol.of_engine:
            block = name
        elif meaning.key is not None:
            block = meaning.key
        else:
            block = standardized(array("I", meaning.tokens), prompt.block_size, _ANY)[0]
        return prompt.lora_name or self._model, block

    def why_not(self, meaning: Meaning) -> str:
        """Return why a block has no such name: `private`, `unnamed_adapter`, `unknown_parent`; empty if it has one."""
        if meaning.private and not self._protocol.tells_apart:
            return "private"
        if meaning.prompt.lora_name is None and meaning.prompt.lora_id is not None:
            return "unnamed_adapter"
        return "unknown_parent" if self.following is not None and meaning.key is None else ""


def _follower(chain: Chain, seed: str, model: str) -> Following:
    def following(key: int | None, prompt: Prompt, tokens: bytes, extra: Sequence[str]) -> int:
        before = chain.root(seed, prompt.lora_name or model) if key is None else key
        return chain.following(before, tokens, extra)

    return following
