"""The listener for predictions where it is wanted only after the start."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import aiohttp
from structlog.testing import capture_logs

from picker.app.config_settings import Predict
from picker.app.kvcache import KvCachePart
from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.plugins.kvcache_args import IndexMode, KvCacheArgs
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.scheduling.scheduler import Scheduler
from picker.io.keep import keep

SPEC = SchedulerSpec((), (("kvcache-aware", 1.0),), {"kvcache-aware": KvCacheArgs(index_mode=IndexMode.DIRECT)})


class Listener:
    """Settings whose address cannot be read at first."""

    enabled = True
    token_environment = ""
    requests_per_second = 100.0

    def __init__(self, address: str) -> None:
        self.asked = 0
        self._address = address

    @property
    def listen(self) -> str:
        self.asked += 1
        if self.asked == 1:
            raise ValueError("no address")
        return self._address


def make(predict) -> tuple[Director, KvCachePart, list[tuple[str, str]]]:
    """A picker's part whose plugin is not enabled yet."""
    told: list[tuple[str, str]] = []
    director = Director(
        Scheduler((), (), ()), EndpointTable(), fallbacks=0, rng=random.Random(1), timer=time.perf_counter_ns
    )
    part = KvCachePart(
        director,
        predict,
        lambda name, run: asyncio.create_task(keep(name, run)),
        lambda where, error: told.append((where, str(error))),
        pause=0.02,
    )
    return director, part, told


def enable(director: Director, part: KvCachePart) -> None:
    director.scheduler, _ = build_scheduler(SPEC, None, lambda *_: None)
    part.configure()


async def answers(port: int) -> bool:
    async with aiohttp.request("GET", f"http://127.0.0.1:{port}/") as answer:
        return answer.status == 404


async def test_a_listener_that_fails_unexpectedly_is_tried_for_again(until):
    director, part, told = make(Listener("127.0.0.1:0"))
    await part.start()
    enable(director, part)
    await until(lambda: part.port is not None)
    assert told == [("predict", "no address")]
    assert await answers(part.port)
    await part.stop()


async def test_a_listener_whose_port_is_taken_gets_it_when_it_is_free_and_says_so_once(until):
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as logs:
        port = taken.getsockname()[1]
        director, part, told = make(Predict(listen=f"127.0.0.1:{port}"))
        await part.start()
        enable(director, part)
        await asyncio.sleep(0.2)
        assert part.port is None
        assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [
            "Predictions cannot be asked for; free the port or change predict.listen"
        ]
    await until(lambda: part.port == port)
    assert await answers(port)
    assert told == []
    await part.stop()


async def test_one_that_is_still_tried_for_ends_with_the_picker():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        director, part, _ = make(Predict(listen=f"127.0.0.1:{taken.getsockname()[1]}"))
        await part.start()
        enable(director, part)
        await asyncio.sleep(0.05)
        await part.stop()
    assert part.port is None
    assert not [task for task in asyncio.all_tasks() if "_listen_late" in repr(task)]
