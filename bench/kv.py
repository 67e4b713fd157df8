"""What it costs to know what engines hold, and to ask: the block index, tokens, and requests while events pour in."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from array import array
from contextlib import AsyncExitStack
from os import kill
from statistics import quantiles
from urllib.request import urlopen

import uvloop

from bench import block_index, dynamo, predicting, rig, tokenizing
from bench.bodies import Bodies
from bench.kv_events import BLOCK, RUN
from bench.load import closed_loop
from bench.report import Row, progress
from picker.app.envoy import Template
from picker.core.block_index.index import BlockIndex
from picker.core.kv_events.events import BlockStored, EventBatch
from picker.io.tokenize.chain import ChainSettings, TokenizerChain
from picker.io.tokenize.local import Local

_BLOCKS_PER_SECOND = 100_000
_ROUNDS = 6
_ROUND_SECONDS = 1.5
_FRAMES = re.compile(r'^picker_kv_events_total\{kind="frames"\} (\S+)', re.MULTILINE)


def run() -> list[Row]:
    progress("requests while events pour in")
    rows = uvloop.run(_background())
    progress("predictions over HTTP")
    rows += uvloop.run(predicting.rows())
    progress("a growing conversation")
    rows += [_growing_row()]
    progress("the block index")
    rows += block_index.rows()
    progress("tokenizing")
    rows += tokenizing.rows()
    progress("Dynamo's RadixTree")
    return rows + dynamo.rows()


def _growing_row() -> Row:
    used, text = tokenizing.tokenizer(), tokenizing.prose()
    turns = [asyncio.run(_turns(Local(used), text[at * 400_000 :])) for at in range(4)]
    first, grown, tokens = min(turns, key=lambda turn: turn[1])
    measured = f"{grown * 1e3:.1f} ms after {first * 1e3:.0f} ms"
    return Row(
        f"{tokens:,} tokens grown by a turn of 400, tokenized and looked up", measured, grown / first, "x", 1 / 20
    )


async def _turns(local: Local, text: str) -> tuple[float, float, int]:
    """CPU seconds from body to matches, at first and after one more turn; and the tokens there were at first.

    In between an engine stores the first turn's blocks, and another goes on with other work.
    """
    chain = TokenizerChain([local], ChainSettings(deadline=10, step_deadline=10))
    index = BlockIndex()
    rng = random.Random(1)

    async def matched(messages: tokenizing.Messages) -> tuple[float, array[int], list[tuple[float, int]]]:
        body = tokenizing.body_of(messages)
        start = time.process_time()
        (prompt,) = (await chain.tokenize(tokenizing.read(body))).prompts
        groups = index.match(index.prompt(prompt.model, prompt.token_ids), 0b11)
        return time.process_time() - start, prompt.token_ids, groups

    index.apply(1, "m", EventBatch(0.0, (BlockStored((1,), None, (1,) * BLOCK, BLOCK),), 0), 0.0)
    messages = tokenizing.conversation(text, 62)
    first, tokens, _ = await matched(messages)
    whole = len(tokens) // BLOCK
    hashes = tuple(rng.getrandbits(64) for _ in range(whole))
    stored = BlockStored(hashes, None, tuple(tokens[: whole * BLOCK]), BLOCK)
    index.apply(0, "m", EventBatch(0.0, (stored,), 0), 0.0)
    index.apply(1, "m", EventBatch(0.0, (BlockStored((2,), 1, (2,) * BLOCK, BLOCK),), 0), 0.0)
    answer = {"role": "assistant", "content": text[-400:]}
    question = {"role": "user", "content": text[-1_600:-400]}
    grown, more, groups = await matched([*messages, answer, question])
    local.close()
    # The generation prompt at the first turn's end is where the answer now stands.
    if groups[0][1] != 1 or groups[0][0] < len(tokens) - 2 * BLOCK or len(more) <= len(tokens):
        raise RuntimeError(f"of {len(tokens)} tokens {groups} were found; nothing was measured")
    return first, grown, len(tokens)


async def _background() -> list[Row]:
    bodies = Bodies(4096)
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        directory = stack.enter_context(tokenizing.tokenizer_directory())
        engines = (await start(rig.engines())).ports
        publisher = await start(rig.event_publisher(_BLOCKS_PER_SECOND))
        known = rig.KvCacheAware(directory, publisher.ports)
        picker = await start(rig.picker(engines, scrape_seconds=1.0, kv_cache=known))
        envoy = await start(rig.envoy(Template.FULL_DUPLEX, picker, engines))
        rows = []
        # Until every engine's cache is full.
        await closed_loop(envoy.port, bodies.next, connections=1, seconds=4)
        for connections, budget in ((1, 1.5), (16, None)):
            latencies: dict[bool, list[float]] = {False: [], True: []}
            frames = cpu = 0.0
            for number in range(2 * _ROUNDS):
                busy = number % 2 == 1
                kill(publisher.pid, signal.SIGCONT if busy else signal.SIGSTOP)
                await asyncio.sleep(0.2)
                before, cpu_before = await _frames(picker), rig.cpu_seconds(picker.pid)
                load = await closed_loop(envoy.port, bodies.next, connections=connections, seconds=_ROUND_SECONDS)
                latencies[busy] += load.latencies
                if busy:
                    frames += (await _frames(picker) - before) / load.seconds / _ROUNDS
                    cpu += (rig.cpu_seconds(picker.pid) - cpu_before) / load.seconds / _ROUNDS
            kill(publisher.pid, signal.SIGCONT)
            without, within = (quantiles(latencies[busy], n=100)[98] for busy in (False, True))
            measured = (
                f"{within * 1e3:.2f} / {without * 1e3:.2f} ms; {frames * 2 * RUN:,.0f} blocks/s stored or dropped"
            )
            what = f"p99 with events / without, {connections} connection{'s' if connections > 1 else ''}"
            rows.append(Row(what, measured, within / without, "x", budget))
            progress(f"{what}: {measured}, picker's CPU {cpu:.0%} of a core")
        return rows


async def _frames(picker: rig.Server) -> float:
    """Frames of events that reached the picker so far."""

    def read() -> str:
        with urlopen(f"http://127.0.0.1:{picker.ports[1]}/metrics", timeout=5) as page:
            text: str = page.read().decode()
            return text

    found = _FRAMES.search(await asyncio.to_thread(read))
    if found is None:
        raise RuntimeError("the picker counts no frames of events")
    return float(found[1])
