"""Which endpoint each session is bound to, as far as one picker knows."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Binding(NamedTuple):
    """An endpoint by the name of its pod and by its address. The address is "" when another router wrote it."""

    pod: str
    address: str

    def same(self, other: Binding) -> bool:
        """Whether both are one endpoint, as far as their addresses are known."""
        known = self.address and other.address
        return self.pod == other.pod and (not known or self.address == other.address)


class Bindings:
    """Bindings by session that end `seconds` after they were last made; the least recent go when there are over `most`.

    A `Store`: nothing comes between finding a binding and making one here, so that the first writer wins. `evicted`
    counts those that went before their time. Times are monotonic seconds, and never go back.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self.seconds = seconds
        self.most = most
        self.evicted = 0
        self._entries: OrderedDict[str, tuple[Binding, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, session: str, now: float) -> Binding | None:
        """The endpoint of a session, None when it is bound to none. Its time does not begin anew."""
        entry = self._entries.get(session)
        return None if entry is None or entry[1] <= now else entry[0]

    def bind(self, session: str, binding: Binding, instead_of: Binding | None, now: float) -> None:  # noqa: ARG002  of the protocol
        """Bind a session; its time begins anew."""
        self._entries[session] = binding, now + self.seconds
        self._entries.move_to_end(session)
        self._expire(now)
        while len(self._entries) > self.most:
            self._entries.popitem(last=False)
            self.evicted += 1

    def release(self, session: str, binding: Binding) -> None:
        """End a binding, unless the session is bound elsewhere by now."""
        entry = self._entries.get(session)
        if entry is not None and entry[0].same(binding):
            del self._entries[session]

    def _expire(self, now: float) -> None:
        """Free what is over: two at most, which keeps pace and costs every call the same."""
        for _ in range(2):
            session, (_, until) = next(iter(self._entries.items()))
            if until > now:
                return
            del self._entries[session]
