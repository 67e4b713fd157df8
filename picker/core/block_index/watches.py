"""Who wants to know when an endpoint stores certain blocks: how far an engine is with a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_PER_WATCH = 256
"""Blocks of one prompt that are waited for, evenly spread; so exactly is known how far it is."""
MOST_BLOCKS = 1 << 17
"""Blocks that are waited for over all prompts, some 100 bytes each."""

Notify = Callable[[int, bool, float], None]
"""Told of `(blocks more than before, whether these were the last, when)`."""


class Watch:
    """One prompt's blocks on one slot. `done` of its `blocks` are stored."""

    __slots__ = ("blocks", "done", "notify", "positions", "slot")

    def __init__(self, slot: int, keys: Sequence[int], notify: Notify) -> None:
        step = -(-len(keys) // MOST_PER_WATCH)
        self.slot = slot
        self.blocks = len(keys)
        self.done = 0
        self.notify = notify
        self.positions = {keys[at]: at + 1 for at in range(len(keys) - 1, -1, -step)}


class Watches:
    """All that is waited for. `refused` prompts were too many."""

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks that are waited for."""
        self.refused = 0
        self._slots: dict[int, dict[int, list[Watch]]] = {}

    def add(self, slot: int, keys: Sequence[int], notify: Notify) -> Watch | None:
        """Wait for these blocks, which are stored one after the other; None if there are none, or too many already.

        `notify` is told until the last one is stored, or `remove` was called.
        """
        if not keys:
            return None
        if self.blocks >= MOST_BLOCKS:
            self.refused += 1
            return None
        watch = Watch(slot, keys, notify)
        waiting = self._slots.setdefault(slot, {})
        for key in watch.positions:
            waiting.setdefault(key, []).append(watch)
        self.blocks += len(watch.positions)
        return watch

    def remove(self, watch: Watch) -> None:
        """Wait no more; nothing happens if that is so already."""
        waiting = self._slots.get(watch.slot, {})
        for key in watch.positions:
            others = waiting.get(key)
            if others is None or watch not in others:
                return
            others.remove(watch)
            self.blocks -= 1
            if not others:
                del waiting[key]
        if not waiting:
            self._slots.pop(watch.slot, None)

    def forget(self, slot: int) -> None:
        """Wait for nothing of a slot any more."""
        self.blocks -= sum(map(len, self._slots.pop(slot, {}).values()))

    def stored(self, slot: int, keys: Sequence[int], now: float) -> None:
        """Tell those who wait that a slot stored blocks, which follow each other."""
        waiting = self._slots.get(slot)
        if not waiting:
            return
        for key in reversed(keys):
            for watch in tuple(waiting.get(key, ())):
                before, watch.done = watch.done, max(watch.done, watch.positions[key])
                last = watch.done == watch.blocks
                if last:
                    self.remove(watch)
                if watch.done > before:
                    watch.notify(watch.done - before, last, now)
