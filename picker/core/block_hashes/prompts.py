"""What the blocks of a prompt are called, for those who know blocks by others' names only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.registry import HASH_PROTOCOLS, HashName
from picker.core.tokens.prompt import MultiModalItem, TokenPrompt


class PromptHashes(Struct, frozen=True):
    """Names the blocks of prompts by a protocol; `seed` is the operator's, see `HashContext`."""

    protocol: HashName = HashName.KTHENA
    seed: str = ""

    def model(self, prompt: TokenPrompt) -> str | None:
        """Return the model under which a prompt's blocks are known: the adapter, if it has one.

        None for a prompt whose cache is kept apart by what the protocol does not cover: it would match others'.
        """
        apart = prompt.cache_salt or prompt.multimodal
        return None if apart and not HASH_PROTOCOLS[self.protocol].tells_apart else prompt.lora or prompt.model

    def hashes(self, prompt: TokenPrompt, block_size: int, most_blocks: int | None = None) -> list[int]:
        """Return the hashes of the blocks that can match, at most `most_blocks` of them.

        Empty where they depend on what is not known: for vLLM, since 0.31, where it loaded an adapter from.
        """
        if not prompt.reads_cache:
            return []
        blocks = max(len(prompt.token_ids) - 1, 0) // block_size
        if most_blocks is not None:
            blocks = min(blocks, most_blocks)
        return self.all_hashes(prompt, block_size, blocks)

    def all_hashes(self, prompt: TokenPrompt, block_size: int, blocks: int) -> list[int]:
        """Return the hashes of the first `blocks` blocks, whether or not they can match."""
        context = HashContext(
            model=prompt.model,
            lora_name=prompt.lora,
            cache_salt=prompt.cache_salt,
            multimodal=_items_by_block(prompt.multimodal, block_size),
            seed=self.seed,
        )
        hasher = HASH_PROTOCOLS[self.protocol].hash_blocks
        return hasher(prompt.token_ids[: blocks * block_size], block_size, context)


def _items_by_block(items: Sequence[MultiModalItem], block_size: int) -> Mapping[int, tuple[tuple[str, int], ...]]:
    """Return the items that overlap each block, with their offsets from its first token."""
    found: dict[int, tuple[tuple[str, int], ...]] = {}
    for item in items:
        for number in range(item.offset // block_size, -(-(item.offset + item.length) // block_size)):
            found[number] = (*found.get(number, ()), (item.identifier, item.offset - number * block_size))
    return found
