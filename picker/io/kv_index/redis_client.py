"""Asks Redis within a budget, and never waits for a Redis that is away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NoReturn

import hiredis
from msgspec import Struct

from picker.core.kv_index.circuit import CircuitBreaker, CircuitState
from picker.io.kv_index.reconnecting import Reconnecting
from picker.io.kv_index.redis_connection import (
    Away,
    Command,
    RedisConnection,
    RedisSettings,
    RedisUnavailableError,
)


class Lookup(StrEnum):
    """How a question ended; the label of a counter. Only OK gave an answer."""

    OK = "ok"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    CIRCUIT_OPEN = "circuit_open"
    REFUSED = "refused"
    """Redis answered with an error."""


class ClientSettings(Struct, frozen=True):
    """How long to wait for Redis. Times in seconds."""

    budget: float = 0.05
    failures: int = 3
    """Failures in a row after which nothing is asked for `pause`, which doubles up to `most_pause`."""
    pause: float = 0.5
    most_pause: float = 10.0
    reconnect: float = 0.1
    most_reconnect: float = 5.0


class RedisClient:
    """One connection that `run` keeps open. `connects` counts how often it was opened.

    `without` says, for the log, what becomes of requests while Redis is away.
    """

    def __init__(
        self,
        redis: RedisSettings,
        settings: ClientSettings = ClientSettings(),  # noqa: B008 (frozen)
        *,
        without: str,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.connects = 0
        self.circuit = CircuitBreaker(settings.failures, settings.pause, settings.most_pause, jitter)
        self._redis = redis
        self._settings = settings
        self._connection: RedisConnection | None = None
        self._failure = Away.BROKEN
        self._reconnecting = Reconnecting(
            away=f"Redis is not available; {without}",
            back="Redis client initialized successfully",
            shortest=settings.reconnect,
            longest=settings.most_reconnect,
            jitter=jitter,
        )

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def failures(self) -> Mapping[str, int]:
        """How often Redis was found not to be available, by reason."""
        return self._reconnecting.failures

    async def run(self) -> None:
        """Stay connected until cancelled: connect again when the connection breaks, and probe an open circuit."""
        try:
            await self._reconnecting.run(self._stay_connected)
        finally:
            self._disconnect()

    async def ask(self, commands: Sequence[Command], *, wrong_type: bool = False) -> tuple[Lookup, list[Any]]:
        """Ask within the budget; the replies are there when it went well.

        An error among them makes it REFUSED, but for that of a key of another type where `wrong_type` replies are
        wanted. Never raises but CancelledError.
        """
        now = asyncio.get_running_loop().time()
        if self.circuit.state(now) is not CircuitState.CLOSED:
            return Lookup.CIRCUIT_OPEN, []
        if self._connection is None:
            return Lookup.UNAVAILABLE, []
        try:
            async with asyncio.timeout(self._settings.budget):
                replies = await self._connection.ask(commands)
        except TimeoutError:
            self._failed(Away.TIMEOUT)
            return Lookup.TIMEOUT, []
        except RedisUnavailableError:
            return Lookup.UNAVAILABLE, []
        if any(
            isinstance(reply, hiredis.ReplyError) and not (wrong_type and _is_wrong_type(reply)) for reply in replies
        ):
            self._failed(Away.REFUSED)
            return Lookup.REFUSED, []
        self.circuit.succeeded()
        return Lookup.OK, replies

    def _failed(self, why: Away) -> None:
        """Count a failure. An open circuit also gives up the connection, since whatever is stuck in it stays stuck."""
        now = asyncio.get_running_loop().time()
        self.circuit.failed(now)
        if self.circuit.state(now) is not CircuitState.CLOSED:
            self._failure = why
            self._disconnect()

    async def _stay_connected(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.circuit.until_probe(loop.time()))
        connection = await self._probed()
        self.circuit.succeeded()
        self.connects += 1
        self._connection = connection
        self._failure = Away.BROKEN
        self._reconnecting.is_back(loop.time(), host=self._redis.host, port=self._redis.port)
        try:
            await connection.closed.wait()
        finally:
            connection.close()
            if self._connection is connection:
                self._connection = None
        text = "the connection broke" if self._failure is Away.BROKEN else "it failed too often in a row"
        raise RedisUnavailableError(text, self._failure)

    async def _probed(self) -> RedisConnection:
        """Open a connection on which Redis answers within the budget."""
        connection: RedisConnection | None = None
        try:
            connection = await RedisConnection.open(self._redis)
            async with asyncio.timeout(self._settings.budget):
                await connection.ask([("PING",)])
        except (RedisUnavailableError, TimeoutError) as error:
            if connection is not None:
                connection.close()
            now = asyncio.get_running_loop().time()
            if self.circuit.state(now) is CircuitState.HALF_OPEN:
                self.circuit.failed(now)
            if isinstance(error, RedisUnavailableError):
                raise
            raise RedisUnavailableError(f"no answer within {self._settings.budget} s", Away.TIMEOUT) from error
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_wrong_type(reply: hiredis.ReplyError) -> bool:
    return str(reply).startswith("WRONGTYPE")
