"""A connection to Redis on which messages of one channel come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from picker.io.kv_index.redis_connection import RedisConnection, RedisSettings


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
        await connection.ask([("SUBSCRIBE", channel)])
        return connection

    def _take(self, reply: Any) -> None:
        match reply:
            case [b"message", bytes(), bytes() as data]:
                self.on_message(data)
            case _:
                super()._take(reply)
