"""A connection to Redis on which messages of one channel come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hiredis

from picker.io.kv_index.redis_connection import Away, RedisConnection, RedisSettings, RedisUnavailableError, why


class Subscription(RedisConnection):
    """Hands messages over as they come, once it is open. Its replies to commands are waited for as usual before that."""

    def __init__(self) -> None:
        super().__init__()
        self.on_message: Callable[[bytes], object] = lambda _: None

    @classmethod
    async def to(cls, settings: RedisSettings, channel: str, on_message: Callable[[bytes], object]) -> Subscription:
        """Connect and subscribe. Raises RedisUnavailableError."""
        connection = await cls.open(settings)
        assert isinstance(connection, Subscription)  # noqa: S101  open makes what it is called on
        connection.on_message = on_message
        try:
            async with asyncio.timeout(settings.connect_timeout):
                await connection._subscribe(channel)  # noqa: SLF001  of its own kind
        except (TimeoutError, RedisUnavailableError) as error:
            connection.close()
            text = f"Redis at {settings.host}:{settings.port}: {str(error) or 'timed out'}"
            raise RedisUnavailableError(text, why(error)) from error
        return connection

    async def _subscribe(self, channel: str) -> None:
        (reply,) = await self.ask([("SUBSCRIBE", channel)])
        if isinstance(reply, hiredis.ReplyError):
            raise RedisUnavailableError(str(reply), Away.REFUSED)

    def _take(self, reply: Any) -> None:
        match reply:
            case [b"message", bytes(), bytes() as data]:
                self.on_message(data)
            case _:
                super()._take(reply)
