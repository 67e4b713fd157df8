"""The shipped Redis, started as it is: what becomes of each of its uses when it is full."""

from __future__ import annotations

import shlex

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from picker.core.kv_index.owners import block_key
from tests.manifests.builds import build, one

POD = one(build("kthena"), "Deployment", "redis")["spec"]["template"]["spec"]
BLOCK = block_key("m", 7)


def options() -> list[str]:
    (container,) = POD["containers"]
    (script,) = container["args"]
    binary, *options = shlex.split(script.removeprefix("exec ").replace("$REDIS_PASSWORD", "secret"))
    assert binary == "redis-server"
    return options


async def test_it_has_room_of_its_own_and_evicts_nothing(make_redis):
    async with make_redis(*options()).client(password="secret") as client:
        found = await client.config_get("maxmemory*")
        assert found["maxmemory-policy"] == "noeviction"
        (container,) = POD["containers"]
        limit = container["resources"]["limits"]["memory"]
        assert limit.endswith("Gi")
        # What clients' buffers and fragments take comes on top.
        assert 4_000_000 * 350 < int(found["maxmemory"]) < 0.8 * int(limit[:-2]) * 2**30


async def test_full_it_keeps_blocks_and_sessions_and_passes_on_what_pickers_tell_each_other(make_redis):
    async with make_redis(*options()).client(password="secret") as client:
        await client.hset(BLOCK, "pod.inference", "1")
        await client.hset("kthena/sticky/a", "pod", "pod")
        await client.expire("kthena/sticky/a", 3600)
        heard = client.pubsub()
        await heard.subscribe("picker:picks")
        await client.config_set("maxmemory", 1)
        with pytest.raises((OutOfMemoryError, ResponseError), match=r"maxmemory|OOM"):
            await client.hset(block_key("m", 8), "pod.inference", "1")
        with pytest.raises((OutOfMemoryError, ResponseError), match=r"maxmemory|OOM"):
            await client.eval("return redis.call('HSET', KEYS[1], 'pod', 'other')", 1, "kthena/sticky/b")
        assert await client.hgetall(BLOCK) == {"pod.inference": "1"}
        assert await client.hget("kthena/sticky/a", "pod") == "pod"
        assert await client.publish("picker:picks", "picked") == 1
        while (message := await heard.get_message(timeout=5)) and message["type"] != "message":
            pass
        assert message["data"] == "picked"
        assert await client.hdel(BLOCK, "pod.inference") == 1
        await heard.aclose()
