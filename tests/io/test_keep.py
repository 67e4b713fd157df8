"""Work that fails or ends is begun again, and failures are seen."""

from __future__ import annotations

import asyncio

import pytest

from picker.io.keep import keep


async def test_what_fails_or_ends_begins_again_and_failures_are_logged(background, until, logs):
    begun = []

    async def work() -> None:
        begun.append(len(begun))
        if begun[-1] == 0:
            raise ValueError("no")
        if begun[-1] == 2:
            await asyncio.Event().wait()

    task = background(keep("sweeping", work, pause=0.01, slot=3))
    await until(lambda: begun == [0, 1, 2])
    (entry,) = logs.entries
    assert (entry["event"], entry["part"], entry["slot"]) == ("A part has failed; it begins again", "sweeping", 3)
    assert entry["exc_info"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
