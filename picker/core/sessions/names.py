"""What declared ids and responses stand for: the content that was last seen with each."""

from __future__ import annotations

from typing import Final

from picker.core.sessions.chain import Chain
from picker.core.tokens.lru import ByteLru

_ENTRY_BYTES: Final = 300
_POSITION_BYTES: Final = 12


class Names:
    """Chains by the keys of `declared`, in `capacity` bytes: those that were not used for longest go first."""

    def __init__(self, capacity: int = 32 << 20) -> None:
        self._chains: ByteLru[int, Chain] = ByteLru(capacity)

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def evictions(self) -> int:
        """Names that went since there was no room."""
        return self._chains.evictions

    def get(self, key: int) -> Chain | None:
        """Return what a name stands for, and keep it longest."""
        return self._chains.get(key)

    def put(self, key: int, chain: Chain) -> None:
        """A name stands for this from now on."""
        self._chains.put(key, chain, _ENTRY_BYTES + _POSITION_BYTES * len(chain.hashes))

    def add(self, key: int, chain: Chain) -> None:
        """The same by hearsay, which may be old: conversations grow, so that what is longer is newer."""
        known = self._chains.get(key)
        if known is None or len(known.hashes) < len(chain.hashes):
            self.put(key, chain)

    def all(self) -> list[tuple[int, Chain]]:
        """Return all of them, what was used longest ago first."""
        return self._chains.items()
