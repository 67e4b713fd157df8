"""Tells other pickers of picks and hears of theirs, through a channel of Redis.

Nothing on the request path waits for it. Redis away: every picker goes on alone, and when it is back they ask each other
for what they have missed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn

import hiredis

from picker.core.director import Director
from picker.core.sharing.replicas import Heard, Replicas
from picker.core.sharing.telling import ALIVE_SECONDS
from picker.io.keep import Failed, keep, log_failure
from picker.io.kv_index.reconnecting import Reconnecting
from picker.io.kv_index.redis_connection import Away, RedisConnection, RedisSettings, RedisUnavailableError
from picker.io.sharing.subscription import Subscription

_MOST_UNANSWERED = 64
"""Publications that Redis has not answered. With more, events wait with us, where they are counted and bounded."""
_SILENT_SECONDS = 5.0
"""We hear ourselves, too. Without that for so long, what looks like a connection is none."""
_EXPIRE_SECONDS = 0.1
_WARM_SECONDS = 2.0
"""A picker that starts waits at most so long to hear what others know."""


class SharedPicks:
    """Runs the exchange. `connects` counts how often Redis was reached, `published` the messages it took.

    `failed` is told of unexpected errors that were survived, as `sharing`.
    """

    def __init__(
        self,
        director: Director,
        redis: RedisSettings,
        channel: str,
        *,
        name: str,
        batch_seconds: float,
        failed: Failed = log_failure,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.replicas = Replicas(director, name)
        self.connects = 0
        self.published = 0
        self.listeners = 0
        """Pickers that the last message reached, ourselves included."""
        self._director = director
        self._redis = redis
        self._channel = channel
        self._batch_seconds = batch_seconds
        self._failed = failed
        self._reconnecting = Reconnecting(
            away="Redis is not available; picks are not shared", back="Picks are shared", jitter=jitter
        )
        self._refused = ""
        """What Redis said in the place of taking our messages."""
        self._own_at = 0.0
        self._unanswered: set[asyncio.Future[list[object]]] = set()
        self._began = director.now()
        self._woken = asyncio.Event()
        self.replicas.wake = self._woken.set

    @property
    def warm(self) -> bool:
        """Whether what others know is here, as far as a picker that starts waits for it."""
        if self._director.now() - self._began > _WARM_SECONDS:
            return True
        # Others say that they live four times a second.
        return self.connects > 0 and self._director.now() - self._began > _WARM_SECONDS / 4 and self.replicas.settled

    @property
    def failures(self) -> Mapping[str, int]:
        """How often Redis was found not to be available, by reason."""
        return self._reconnecting.failures

    async def run(self) -> None:
        """Stay connected until cancelled."""
        self._director.sharing = self.replicas
        watching = asyncio.create_task(
            keep("sharing", self._forget_the_silent, pause=_EXPIRE_SECONDS, failed=self._failed)
        )
        try:
            await self._reconnecting.run(self._stay_connected)
        finally:
            watching.cancel()
            self._director.sharing = None

    async def _forget_the_silent(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_SECONDS)
            self.replicas.expire(self._director.now())

    async def _stay_connected(self) -> NoReturn:
        subscription = await Subscription.to(self._redis, self._channel, self._receive)
        try:
            publisher = await RedisConnection.open(self._redis)
        except BaseException:
            subscription.close()
            raise
        self.connects += 1
        self._refused = ""
        self._own_at = self._director.now()
        try:
            while not (subscription.closed.is_set() or publisher.closed.is_set() or self._refused):
                if self._director.now() - self._own_at > _SILENT_SECONDS:
                    raise self._gone(f"our own messages did not come back for {_SILENT_SECONDS:g} s", Away.TIMEOUT)
                self._publish(publisher)
                await asyncio.sleep(self._batch_seconds)
                await self._until_pending()
        except asyncio.CancelledError:
            await self._say_goodbye(publisher)
            raise
        finally:
            subscription.close()
            publisher.close()
            self._unanswered.clear()
        raise self._gone(self._refused or "the connection broke", Away.REFUSED if self._refused else Away.BROKEN)

    def _gone(self, text: str, reason: Away) -> RedisUnavailableError:
        return RedisUnavailableError(f"Redis at {self._redis.host}:{self._redis.port}: {text}", reason)

    async def _until_pending(self) -> None:
        """Wait for something to tell. So what comes after a pause is told at once, and what follows it in batches."""
        self._woken.clear()
        if not self.replicas.pending:
            with suppress(TimeoutError):
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self._woken.wait()

    def _receive(self, data: bytes) -> None:
        now = self._director.now()
        try:
            heard = self.replicas.receive(data, now)
        except Exception as error:  # noqa: BLE001  it would end the connection; what is lost with it is asked for
            self._failed("sharing", error)
            return
        if heard is Heard.OWN:
            self._own_at = now
            loop = asyncio.get_running_loop()
            self._reconnecting.is_back(loop.time(), channel=self._channel, name=self.replicas.name)

    def _publish(self, publisher: RedisConnection) -> None:
        if len(self._unanswered) >= _MOST_UNANSWERED:
            return
        messages = self.replicas.flush(self._director.now())
        if messages:
            commands = [("PUBLISH", self._channel, message) for message in messages]
            publication = asyncio.ensure_future(publisher.ask(commands))
            self._unanswered.add(publication)
            publication.add_done_callback(self._answered)

    def _answered(self, publication: asyncio.Future[list[object]]) -> None:
        self._unanswered.discard(publication)
        if publication.cancelled():
            return
        error = publication.exception()
        if error is not None:
            if not isinstance(error, RedisUnavailableError):
                self._failed("sharing", error)
            return
        for reply in publication.result():
            if isinstance(reply, int):
                self.published += 1
                self.listeners = reply
            elif isinstance(reply, hiredis.ReplyError):
                self._refused = str(reply)

    async def _say_goodbye(self, publisher: RedisConnection) -> None:
        try:
            async with asyncio.timeout(0.2):
                await publisher.ask([("PUBLISH", self._channel, self.replicas.leave())])
        except (TimeoutError, RedisUnavailableError):
            return
