"""Reads what engines say of tokens out of responses that pass, and counts what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from picker.core.telemetry import Telemetry
from picker.core.usage import Usage, UsageReader


class UsageTap:
    """One response's usage, and with `keep_reply` its reply. What goes wrong in reading costs these and nothing else.

    `headers` are the response's, `path` is the request's.
    `outcomes` counts `read` and `absent` responses, and by `Drop` what could not be used.
    """

    __slots__ = ("_outcomes", "_reader", "_telemetry")

    def __init__(
        self,
        headers: Mapping[str, bytes],
        path: str,
        outcomes: Counter[str],
        telemetry: Telemetry,
        *,
        keep_reply: bool,
    ) -> None:
        self._outcomes = outcomes
        self._telemetry = telemetry
        self._reader: UsageReader | None = UsageReader(
            headers.get("content-type", b""), headers.get("content-encoding", b""), path, keep_reply=keep_reply
        )

    def feed(self, data: bytes) -> None:
        """Take in the next piece of the body."""
        if self._reader is not None:
            try:
                self._reader.feed(data)
            except Exception as error:  # noqa: BLE001  a response never fails because reading it did
                self._give_up(error)

    def result(self) -> Usage | None:
        """What was said, now that the response is over."""
        reader = self._reader
        if reader is None:
            return None
        try:
            usage = reader.result()
        except Exception as error:  # noqa: BLE001  as above
            self._give_up(error)
            return None
        self._outcomes["absent" if usage is None else "read"] += 1
        for why, times in reader.drops.items():
            self._outcomes[why] += times
        return usage

    def _give_up(self, error: Exception) -> None:
        self._reader = None
        self._telemetry.failed("usage", error)
