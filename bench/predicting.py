"""What a prediction costs whoever asks for it, over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from statistics import quantiles

import aiohttp

from bench import rig, tokenizing
from bench.report import Row

_TOKENS = 4096
_ASKED = 200


async def rows() -> list[Row]:
    """Ask `picker serve`, which follows eight engines with full caches, for prompts that it has never seen."""
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        directory = stack.enter_context(tokenizing.tokenizer_directory())
        engines = (await start(rig.engines())).ports
        publisher = await start(rig.event_publisher(100_000))
        known = rig.KvCacheAware(directory, publisher.ports)
        picker = await start(rig.picker(engines, scrape_seconds=1.0, kv_cache=known))
        session = await start(aiohttp.ClientSession())
        await asyncio.sleep(3)  # until the caches are full
        os.kill(publisher.pid, signal.SIGSTOP)
        try:
            return [await _measured(session, f"http://127.0.0.1:{picker.ports[2]}/v1/cache/predict")]
        finally:
            os.kill(publisher.pid, signal.SIGCONT)


async def _measured(session: aiohttp.ClientSession, url: str) -> Row:
    text = tokenizing.prose()
    size = 4 * _TOKENS
    seconds: list[float] = []
    tokens = failed = number = 0
    while len(seconds) < _ASKED:
        body = tokenizing.body_of([{"role": "user", "content": text[number * size // 2 :][:size]}])
        number += 1
        began = time.perf_counter()
        async with session.post(url, data=body) as answer:
            read = await answer.json()
        if answer.status != 200:  # the tokenizer is being loaded, or the machine has other things to do
            failed += 1
            if failed > _ASKED:
                raise RuntimeError(read)
        else:
            seconds.append(time.perf_counter() - began)
            tokens += read["total_prompt_tokens"]
    cut = quantiles(seconds, n=100)
    measured = f"p50 {cut[49] * 1e3:.1f} ms, p99 {cut[98] * 1e3:.1f} ms"
    return Row(f"a prediction over HTTP, {tokens // _ASKED:,} tokens never seen", measured, cut[49] * 1e3, "ms", 9.9)
