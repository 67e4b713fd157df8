"""Work that fails or ends is begun again, and failures are seen."""

from __future__ import annotations

import asyncio

import pytest

from picker.io.keep import keep, tell_unseen


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


async def test_failures_are_told_where_they_are_counted(background, until, logs):
    told = []

    async def work() -> None:
        raise ValueError(str(len(told)))

    background(keep("sweeping", work, pause=0.01, failed=lambda *failure: told.append(failure), slot=3))
    await until(lambda: len(told) == 2)
    assert [error.__notes__ for _, error in told] == [["slot: 3"]] * 2
    assert [(part, str(error)) for part, error in told] == [("sweeping", "0"), ("sweeping", "1")]
    assert not logs.entries


async def test_what_callbacks_and_forgotten_tasks_raise_is_told_but_for_errors_of_connections(until, caplog):
    told = []
    loop = asyncio.get_running_loop()
    tell_unseen(loop, lambda *failure: told.append(failure))

    def fail(error: Exception) -> None:
        raise error

    async def forgotten() -> None:
        raise KeyError("task")

    for error in (ConnectionResetError("peer"), ValueError("callback")):
        loop.call_soon(fail, error)
    task = asyncio.create_task(forgotten())
    await asyncio.wait([task])
    del task
    await until(lambda: len(told) == 2)
    assert [(where, repr(error)) for where, error in told] == [
        ("event_loop", "ValueError('callback')"),
        ("event_loop", "KeyError('task')"),
    ]
    assert "ConnectionResetError: peer" in caplog.text
    loop.set_exception_handler(None)
