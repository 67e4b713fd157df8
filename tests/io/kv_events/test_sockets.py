"""ZMQ sockets on the loop: news that somebody else took the signal of."""

from __future__ import annotations

import asyncio

import zmq

from picker.io.kv_events.sockets import has_more, readable


async def test_whoever_waits_for_news_gets_them_although_another_has_looked():
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.linger = other.linger = 0
        one.bind("inproc://news")
        other.connect("inproc://news")
        looked = asyncio.Event()
        for _ in range(50):
            waiting = asyncio.create_task(readable(one, looked))
            await asyncio.sleep(0)
            other.send(b"news")
            # Looking takes the signal away before the loop has seen it.
            assert has_more(one)
            looked.set()
            await asyncio.wait_for(waiting, 5)
            assert one.recv(zmq.NOBLOCK) == b"news"
