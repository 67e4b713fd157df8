"""Deletes from Redis what sidecars that are gone have left there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from picker.core.kv_index.owners import BLOCK_PREFIX, parse_value
from picker.io.kv_index.redis_connection import Command, RedisConnection, scanned


async def delete_stale_owners(
    connection: RedisConnection, *, age: float = 86_400.0, clock: Callable[[], float] = time.time, pause: float = 0.01
) -> int:
    """Delete, of all owners, what was written longer than `age` seconds ago; returns how many.

    Sidecars write what they still hold again long before that, so that only those that are gone are left behind.
    It goes through all blocks in slices with `pause` seconds in between. Raises RedisUnavailableError.
    """
    cursor = b"0"
    deleted = 0
    while True:
        (reply,) = await connection.ask([("SCAN", cursor, "MATCH", BLOCK_PREFIX + "*", "COUNT", 256)])
        cursor, keys = scanned(reply)
        owners = await connection.ask([("HGETALL", key) for key in keys])
        before = clock() - age
        commands: list[Command] = []
        for key, fields in zip(keys, owners, strict=True):
            if isinstance(fields, list):
                stale = [
                    name for name, value in zip(fields[::2], fields[1::2], strict=False) if _is_stale(value, before)
                ]
                if stale:
                    commands.append(("HDEL", key, *stale))
        deleted += sum(count for count in await connection.ask(commands) if isinstance(count, int))
        if cursor == b"0":
            return deleted
        await asyncio.sleep(pause)


def _is_stale(value: bytes, before: float) -> bool:
    written, _ = parse_value(value[:64])
    return written is not None and written < before
