"""Clients that leave before their request is over."""

from __future__ import annotations

import asyncio
import random

from tests.support.bodies import chat_of
from tests.support.http_client import RawClient

STAGES = ["before the upload", "during the upload", "after the upload", "during the answer"]


async def leave(port: int, stage: str, dice: random.Random) -> None:
    """Begin a request and drop the connection at one of its stages."""
    client = await RawClient.connect(port)
    body = chat_of(dice.choice((200, 70_000)), dice.randrange(10**9))
    try:
        await client.head(
            "POST", "/v1/chat/completions?bytes=3000&chunks=30&every=0.01", [("content-length", str(len(body)))]
        )
        if stage == "before the upload":
            return
        if stage == "during the upload":
            await client.send(body[: len(body) // 2])
            await asyncio.sleep(dice.random() * 0.02)
            return
        await client.send(body)
        if stage == "after the upload":
            await asyncio.sleep(dice.random() * 0.02)
            return
        await asyncio.wait_for(client.answer_head(), 10)
        async for _ in client.chunks():
            if dice.random() < 0.2:
                return
    finally:
        client.abort()
