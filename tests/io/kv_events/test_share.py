"""Readers that share a loop: whoever has much to read holds up neither the other readers nor the loop."""

from __future__ import annotations

import asyncio
from itertools import count

from picker.io.kv_events.share import LoopShare


async def test_everything_is_read_and_in_order():
    share, seen = LoopShare(), []
    waiting = iter(range(5000))

    def read_one() -> bool:
        value = next(waiting, None)
        if value is not None:
            seen.append(value)
        return value is not None

    assert await share.read(read_one)
    assert seen == list(range(5000))
    assert not await share.read(read_one)


async def test_a_reader_that_never_ends_holds_up_nobody():
    share, read = LoopShare(), count()
    endless = [asyncio.create_task(share.read(lambda: next(read) >= 0)) for _ in range(3)]
    await asyncio.sleep(0)
    for _ in range(20):
        left = iter((True, True, False))
        async with asyncio.timeout(5):
            await share.read(lambda left=left: next(left))
            await asyncio.sleep(0)
        assert list(left) == []
    assert next(read) > 0
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)
    async with asyncio.timeout(5):
        await share.read(lambda: False)


async def test_readers_wait_while_something_is_urgent():
    share, seen = LoopShare(patience=3600), []
    waiting = iter(range(100))

    def read_one() -> bool:
        value = next(waiting, None)
        if value is not None:
            seen.append(value)
        return value is not None

    await share.read(lambda: False)
    with share.urgent(), share.urgent():
        reading = asyncio.create_task(share.read(read_one))
        for _ in range(10):
            await asyncio.sleep(0)
        assert seen == []
    await reading
    assert seen == list(range(100))


async def test_what_is_urgent_for_ever_does_not_end_reading():
    share = LoopShare()
    with share.urgent():
        for _ in range(3):
            left = iter((True, True, False))
            async with asyncio.timeout(5):
                await share.read(lambda left=left: next(left))
            assert list(left) == []
