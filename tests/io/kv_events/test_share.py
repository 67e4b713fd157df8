"""Readers that share a loop: whoever has much to read holds up neither the other readers nor the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import count

from picker.io.kv_events.share import LoopShare, Precedence


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


class Frames:
    """A hundred of them; what was read, and what happens when a given one is."""

    def __init__(self, when: int = -1, happens: Callable[[], object] = lambda: None) -> None:
        self.read: list[int] = []
        self._when = when
        self._happens = happens

    def read_one(self) -> bool:
        if len(self.read) == 100:
            return False
        self.read.append(len(self.read))
        if self.read[-1] == self._when:
            self._happens()
        return True


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_readers_wait_while_anything_has_precedence():
    share, frames = LoopShare(patience=3600), Frames()
    await share.read(lambda: False)
    ones = [share.precedence() for _ in range(2)]
    for one in ones:
        one.enter()
    reading = asyncio.create_task(share.read(frames.read_one))
    for one in ones:
        await turns()
        assert frames.read == []
        one.end()
    await reading
    assert frames.read == list(range(100))


async def test_readers_stop_for_what_gets_precedence_meanwhile():
    share = LoopShare(patience=3600)
    await share.read(lambda: False)
    one = share.precedence()
    frames = Frames(3, one.enter)
    reading = asyncio.create_task(share.read(frames.read_one))
    await turns()
    assert frames.read == [0, 1, 2, 3]
    one.end()
    await reading
    assert len(frames.read) == 100


async def test_readers_read_while_a_thread_works_without_the_interpreter():
    share, frames = LoopShare(patience=3600), Frames()
    await share.read(lambda: False)
    one = share.precedence()
    one.enter()
    reading = asyncio.create_task(share.read(frames.read_one))
    await turns()
    before = len(frames.read)
    loop, all_read = asyncio.get_running_loop(), threading.Event()
    reading.add_done_callback(lambda _: all_read.set())

    def work() -> bool:
        with one.away():
            return all_read.wait(10)

    assert await loop.run_in_executor(None, work)
    assert (before, len(frames.read)) == (0, 100)
    later = asyncio.create_task(share.read(Frames().read_one))
    await asyncio.sleep(0.05)
    assert not later.done()
    one.end()
    await later


async def test_what_has_precedence_for_ever_does_not_end_reading():
    share = LoopShare()
    share.precedence().enter()
    for _ in range(3):
        frames = Frames()
        async with asyncio.timeout(5):
            await share.read(frames.read_one)
        assert len(frames.read) == 100


async def test_a_rest_that_something_cut_short_is_not_the_last_one():
    share = LoopShare()
    for _ in range(3):
        await share.read(Frames().read_one)
        one = share.precedence()
        one.enter()
        with one.away():
            await turns()
        one.end()
    async with asyncio.timeout(5):
        await asyncio.gather(*(share.read(Frames().read_one) for _ in range(4)))


def test_a_thread_that_works_longer_than_its_loop_is_no_error():
    async def begin() -> Precedence:
        share = LoopShare()
        await share.read(lambda: False)
        return share.precedence()

    one = asyncio.run(begin())
    one.enter()
    with one.away():
        pass
    one.end()
