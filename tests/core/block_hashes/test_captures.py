"""The hashes that a real vLLM 0.32.0 (`sha256`, no PYTHONHASHSEED) published, computed again from its tokens."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from picker.core.block_hashes.context import HashContext
from picker.core.block_hashes.registry import HASH_PROTOCOLS
from picker.core.kv_events.decode import decode
from picker.core.kv_events.events import BlockStored

CAPTURES = Path(__file__).parents[2] / "data" / "captures"

# Hashes published in each recording. The paths of the adapters were not recorded, so theirs cannot be computed.
EQUAL = {
    "bytes-A": {"equal": 160},
    "chat-A": {"equal": 454},
    "concurrent-A": {"equal": 280},
    "evict-A": {"equal": 383},
    "hybrid-A": {"equal": 885},
    "lora-A": {"equal": 171, "adapter": 336},
    "restart-A": {"equal": 228},
}


def stores(name: str) -> list[BlockStored]:
    with gzip.open(CAPTURES / f"{name}.jsonl.gz", "rt") as lines:
        frames: list[Any] = [record for record in map(json.loads, lines) if record["kind"] == "frame"]
    batches = [decode(base64.b64decode(record["payload"])) for record in frames]
    assert not any(batch.dropped for batch in batches)
    # Those that send all their blocks first: they tell what the hashes of sliding-window groups stand for.
    events = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
    return sorted(events, key=lambda event: event.kv_cache_spec_kind == "sliding_window")


def salt_of(event: BlockStored) -> str | None:
    salts = [key for key in (event.extra_keys or (None,))[0] or () if key != event.lora_name]
    return salts[0] if salts else None


@pytest.mark.parametrize("name", EQUAL)
def test_hashes_of_a_real_engine(name: str):
    prompts: dict[int, tuple[tuple[int, ...], str | None]] = {}
    seen: Counter[str] = Counter()
    for event in stores(name):
        before, salt = ((), salt_of(event)) if event.parent is None else prompts[event.parent]
        tokens = before + event.token_ids
        context = HashContext(model="tiny", lora_name=event.lora_name, cache_salt=salt)
        computed = HASH_PROTOCOLS["vllm-sha256"].hash_blocks(tokens, event.block_size, context)
        at = len(before) // event.block_size
        if event.kv_cache_spec_kind == "sliding_window":  # names some of the blocks whose tokens it sends
            missing = set(event.block_hashes) - set(computed[at:])
            seen.update(equal=len(event.block_hashes) - len(missing), different=len(missing))
            continue
        for number, published in enumerate(event.block_hashes, start=at):
            prompts[published] = (tokens[: (number + 1) * event.block_size], salt)
            seen["adapter" if not computed else "equal" if computed[number] == published else "different"] += 1
    assert +seen == EQUAL[name]
