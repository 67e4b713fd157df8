"""ZMQ sockets on the loop: waited for one by one, and read in rounds with all others.

pyzmq's own are watched for good, and wake the loop for every message, be anybody waiting or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from picker.io.kv_events.source import SubscriberSettings

MAX_SOCKETS = 16_384
"""libzmq's own limit is 1,023 sockets a context; a rank needs three, and a fourth while it replays."""

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def new_context() -> Context:
    """Return a ZMQ context with room for many engines, for all subscribers of a process."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def open_socket(context: Context, kind: int, settings: SubscriberSettings) -> Socket:
    """Open a socket that reconnects, and notices when nobody is there any more."""
    socket = zmq.Socket(context, kind)
    for option, value in (
        (zmq.IPV6, 1),
        (zmq.LINGER, 0),
        (zmq.RCVHWM, settings.high_water_mark),
        (zmq.MAXMSGSIZE, 4 * settings.limits.max_frame),  # larger ones are not even read
        (zmq.RECONNECT_IVL, round(1000 * settings.reconnect)),
        (zmq.RECONNECT_IVL_MAX, round(1000 * settings.reconnect_most)),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 15),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
    return socket


def open_monitor(context: Context, watched: Socket, events: int) -> Socket:
    """Open a socket that tells what happens to another one's connection."""
    place = f"inproc://monitor-{int(watched.get(zmq.FD))}"
    watched.monitor(place, events)
    monitor = zmq.Socket(context, zmq.PAIR)
    monitor.connect(place)
    return monitor


def has_more(socket: Socket) -> bool:
    """Whether there is something to read."""
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


async def readable(socket: Socket, looked: asyncio.Event | None = None) -> None:
    """Wait until there is something to read.

    A socket signals news once, and whoever looks at it takes the signal away. So where others look at it, too, they have
    to set `looked` afterwards.
    """
    loop = asyncio.get_running_loop()
    descriptor = int(socket.get(zmq.FD))
    signalled = looked or asyncio.Event()
    signalled.clear()
    while not has_more(socket):
        loop.add_reader(descriptor, signalled.set)  # which only says that it is worth while to look
        try:
            await signalled.wait()
        finally:
            loop.remove_reader(descriptor)
        signalled.clear()


def read_one(socket: Socket, take: Callable[[Sequence[bytes]], None]) -> bool:
    """Hand over the next message; False if there is none."""
    try:
        parts = socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return False
    take(parts)
    return True
