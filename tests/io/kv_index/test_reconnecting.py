"""Connected or away: what is said and counted of it, and how long the pauses are."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.io.kv_index.reconnecting import REMEDIES, Reconnecting
from picker.io.kv_index.redis_connection import Away, RedisConnection, RedisSettings, RedisUnavailableError


def make(*, jitter=lambda: 1.0, shortest=0.1, longest=5.0) -> Reconnecting:
    return Reconnecting(away="it is away", back="it is back", shortest=shortest, longest=longest, jitter=jitter)


def gone(reason: Away = Away.UNREACHABLE, text: str = "why") -> RedisUnavailableError:
    return RedisUnavailableError(text, reason)


def test_an_absence_is_said_once_with_its_remedy_and_so_is_its_end(logs):
    one = make()
    for number in range(5):
        one.is_away(gone(text=f"attempt {number}"), float(number))
    one.is_back(6.0, port=1)
    one.is_back(7.0, port=1)
    assert logs.entries == [
        {
            "event": "it is away",
            "log_level": "warning",
            "error": "attempt 0",
            "remedy": "check host and port, that it runs, and that network policies let us through",
        },
        {"event": "it is back", "log_level": "info", "port": 1},
    ]
    one.is_away(gone(), 8.0)
    assert [entry["event"] for entry in logs.entries] == ["it is away", "it is back", "it is away"]


def test_another_reason_is_said_too(logs):
    one = make()
    for reason in (Away.UNREACHABLE, Away.REFUSED, Away.UNREACHABLE, Away.REFUSED):
        one.is_away(gone(reason), 0.0)
    assert [entry["remedy"].split()[1] for entry in logs.entries] == ["host", "user,"]
    assert one.failures == {"unreachable": 2, "refused": 2, "timeout": 0, "broken": 0}


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_connection_that_lasted():
    one = make()
    assert [one.is_away(gone(), 0.0) for _ in range(8)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    one.is_back(10.0)
    assert one.is_away(gone(), 14.0) == 5.0  # one that breaks at once is not asked for all the time
    one.is_back(20.0)
    assert one.is_away(gone(), 25.1) == pytest.approx(0.1)


@given(
    st.lists(st.sampled_from([*Away, None]), max_size=60), st.integers(0, 2**32), st.floats(0.01, 1), st.floats(1, 10)
)
def test_whatever_happens_the_pauses_are_bounded_and_everything_is_counted(history, seed, shortest, longest):
    one = make(jitter=random.Random(seed).random, shortest=shortest, longest=longest)
    for now, reason in enumerate(history):
        if reason is None:
            one.is_back(float(now))
        else:
            assert shortest / 2 <= one.is_away(gone(reason), float(now)) <= longest
        assert one.connected == (reason is None)
    assert one.failures == {reason: history.count(reason) for reason in Away}


def test_there_is_a_remedy_for_everything():
    assert REMEDIES.keys() == set(Away)


async def test_it_tries_until_it_is_there_and_again_when_it_is_gone(make_redis, background, until, logs):
    server = make_redis()
    one = make(shortest=0.01, longest=0.05)

    async def stay():
        connection = await RedisConnection.open(server.settings)
        one.is_back(asyncio.get_running_loop().time())
        await connection.closed.wait()
        raise RedisUnavailableError("the connection broke")

    task = background(one.run(stay))
    await until(lambda: one.connected)
    server.kill()
    await until(lambda: one.failures["unreachable"] >= 3)
    server.start()
    await until(lambda: one.connected)
    assert one.failures["broken"] == 1
    # Broken, then unreachable, for however many attempts.
    assert [entry["event"] for entry in logs.entries] == ["it is back", "it is away", "it is away", "it is back"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_reasons_tell_failures_apart(make_redis):
    server = make_redis("--requirepass", "secret")

    async def reason(settings: RedisSettings) -> Away:
        with pytest.raises(RedisUnavailableError) as error:
            await RedisConnection.open(settings)
        return error.value.reason

    assert await reason(server.settings) is Away.REFUSED
    server.stall()
    assert await reason(RedisSettings("127.0.0.1", server.port, connect_timeout=0.05)) is Away.TIMEOUT
    server.kill()
    assert await reason(server.settings) is Away.UNREACHABLE
