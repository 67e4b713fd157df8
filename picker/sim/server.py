"""The HTTP face of a simulated engine: vLLM's, on aiohttp."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash
from aiohttp import web

from picker.sim import openai
from picker.sim.answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    MessagesAnswer,
    ResponsesAnswer,
    Usage,
    encode_json,
    error_body,
)
from picker.sim.block_cache import key_tokens
from picker.sim.config import EngineSimConfig
from picker.sim.driver import Driver, EngineDeadError, Generation
from picker.sim.engine import Engine, Request, Running
from picker.sim.events import KvEvent
from picker.sim.exposition import exposition
from picker.sim.faults import Fault, Faults
from picker.sim.openai import ApiError, Call, bad_request
from picker.sim.prefill import Prefillers
from picker.sim.publisher import EventFaults, KvEventPublisher
from picker.sim.stored import ResponseStore
from picker.sim.tokenizer import decode, generate

VERSION = "0.32.0+sim"
"""The vLLM release whose behaviour is imitated."""
MAX_BODY = 64 * 1024 * 1024
JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Api:
    """One way to ask for text."""

    read: Callable[[bytes], Call]
    answer: type[Answer]
    prefix: str
    """Of the identities of its answers."""


def apis(stored: ResponseStore) -> dict[str, Api]:
    """All of them, by path."""
    return {
        "/v1/completions": Api(openai.completion, CompletionAnswer, "cmpl-"),
        "/v1/chat/completions": Api(openai.chat, ChatAnswer, "chatcmpl-"),
        "/v1/responses": Api(lambda data: openai.responses(data, stored.turns), ResponsesAnswer, "resp_"),
        "/v1/messages": Api(openai.messages, MessagesAnswer, "msg_"),
    }


class EngineServer:
    """Handlers of one engine, or of several data-parallel ones. Needs a running event loop.

    `publish` gets the cache events of each rank, `publishers` are those of them that listen.
    """

    def __init__(
        self,
        config: EngineSimConfig,
        publish: Sequence[Callable[[list[KvEvent], float], None] | None],
        publishers: Sequence[KvEventPublisher] = (),
    ) -> None:
        self.config = config
        self._publish = publish
        self._publishers = publishers
        self.drivers = [Driver(self._engine(rank)) for rank in range(config.data_parallel_size)]
        self.faults = Faults()
        self.refused: Counter[int] = Counter()
        self._created = int(time.time())
        self._number = 0
        self._turn = -1
        self._prefillers = Prefillers()
        self._stored = ResponseStore()
        self._set_fault(config.fault)

    def _engine(self, rank: int) -> Engine:
        return Engine(self.config.limits, self.config.cost, self._publish[rank])

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._errors])
        app.on_response_prepare.append(self._sign)
        app.on_cleanup.append(self._prefillers.close)
        for path, api in apis(self._stored).items():
            app.router.add_post(path, self._generating(api))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/sim/stats", self._stats)
        app.router.add_post("/sim/faults", self._faults)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_get("/kv_event_sources", self._kv_event_sources)
        app.router.add_post("/sim/kv_event_faults", self._kv_event_faults)
        app.router.add_post("/sim/restart", self._restart)
        return app

    def stats(self) -> dict[str, Any]:
        """Return what happened so far, for tests and people."""
        engines = [driver.engine for driver in self.drivers]
        counts = sum((driver.counts for driver in self.drivers), Counter[str]())
        return {
            "name": self.config.name,
            "requests": counts["submitted"],
            "finished": counts["finished"],
            "aborted": counts["aborted"],
            "refused": {str(status): count for status, count in self.refused.items()},
            "prompt_tokens": counts["prompt_tokens"],
            "cached_tokens": sum(engine.prefix_hits for engine in engines),
            "transferred_tokens": sum(engine.transferred for engine in engines),
            "prefilled_elsewhere": dict(self._prefillers.counts),
            "generated_tokens": counts["generated_tokens"],
            "running": sum(engine.running for engine in engines),
            "waiting": sum(engine.waiting for engine in engines),
            "steps": sum(engine.steps for engine in engines),
            "evictions": sum(engine.cache.evictions for engine in engines),
            "preemptions": sum(engine.preemptions for engine in engines),
            "used_blocks": sum(engine.cache.used for engine in engines),
            "usable_blocks": sum(engine.cache.usable for engine in engines),
            "faults": dict(self.faults.counts),
        }

    def _generating(self, api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            fault = self.faults.next()
            if fault.mode == "error":
                raise ApiError(fault.status, "InternalServerError", "this engine was told to fail")
            body = await request.read()
            call = api.read(body)
            model, lora = self._model(call.model)
            identity = api.prefix + (request.headers.get("X-Request-Id") or uuid.uuid4().hex)
            answer = api.answer(call, identity, model, int(time.time()))

            def keep(texts: Sequence[str]) -> None:
                if call.turns is not None:
                    self._stored.keep(identity, call.turns, texts[0])

            driver = self._driver(request.headers.get("X-data-parallel-rank"))
            there = await self._prefillers.compute(request, body)
            generation = self._start(driver, call, lora, transferred=there)
            try:
                if call.stream:
                    return await self._stream(request, answer, driver, generation, fault, keep)
                await generation.news()
                if fault.mode in ("abort", "hang"):
                    await _misbehave(fault, request)
                texts, usages = _texts(generation), self._usages(driver, generation)
                keep(texts)
                return web.Response(body=answer.whole(texts, _total(usages)), content_type=JSON)
            finally:
                driver.cancel(generation)

        return handle

    def _driver(self, rank: str | None) -> Driver:
        """Return the engine that a request goes to: the one it names, or each in turn."""
        if rank is None:
            self._turn = (self._turn + 1) % len(self.drivers)
            return self.drivers[self._turn]
        if not (rank.isascii() and rank.isdecimal() and int(rank) < len(self.drivers)):
            raise bad_request(f"X-data-parallel-rank is {rank}: this engine has ranks 0 .. {len(self.drivers) - 1}")
        return self.drivers[int(rank)]

    def _start(self, driver: Driver, call: Call, lora: str | None, *, transferred: bool) -> Generation:
        waiting = driver.engine.waiting
        if waiting + len(call.prompts) > self.config.max_waiting:
            raise ApiError(503, "ServiceUnavailableError", f"{waiting} requests are waiting, try again later")
        limit = self.config.limits.context_length
        longest = max(map(len, call.prompts))
        if longest + call.max_tokens > limit:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens. However, you requested {call.max_tokens} output "
                f"tokens and your prompt contains {longest} input tokens. Shorten the prompt or lower max_tokens.",
                "max_tokens",
            )
        requests = []
        for prompt in call.prompts:
            self._number += 1
            output = generate(xxhash.xxh3_64_intdigest(prompt), call.max_tokens)
            content = key_tokens(
                prompt + output, self.config.limits.block_size, lora_name=lora, cache_salt=call.cache_salt
            )
            requests.append(Request(str(self._number), content, len(prompt), call.read_cache, transferred))
        return driver.start(requests, streaming=call.stream)

    async def _stream(
        self,
        request: web.Request,
        answer: Answer,
        driver: Driver,
        generation: Generation,
        fault: Fault,
        keep: Callable[[Sequence[str]], None],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM})
        await response.prepare(request)
        sent = [0] * len(generation.members)
        chunks = 0
        while True:
            if fault.mode in ("abort", "hang") and chunks >= fault.after_chunks:
                await _misbehave(fault, request)
            try:
                await generation.news()
            except EngineDeadError:
                await _misbehave(Fault(mode="abort"), request)  # too late for another status
            usages = self._usages(driver, generation)
            parts = [] if chunks else [answer.opening([Usage(usage.prompt, 0, usage.cached) for usage in usages])]
            for index, (member, usage) in enumerate(zip(generation.members, usages, strict=True)):
                if usage.completion > sent[index]:
                    text = _text(member, sent[index], usage.completion)
                    last = member.request.prompt_tokens + usage.completion == member.total
                    parts.append(answer.delta(index, text, usage, last=last))
                    sent[index] = usage.completion
            chunks += 1
            if not generation.unfinished:
                texts = _texts(generation)
                keep(texts)
                parts.append(answer.closing(texts, _total(usages)))
                await response.write(b"".join(parts))
                return response
            await response.write(b"".join(parts))

    def _usages(self, driver: Driver, generation: Generation) -> list[Usage]:
        return [
            Usage(member.request.prompt_tokens, driver.engine.generated(member), member.cached_tokens or 0)
            for member in generation.members
        ]

    def _model(self, name: str | None) -> tuple[str, str | None]:
        """Return the model to name in the answer, and the LoRA adapter to use."""
        if name is None or name == self.config.model:
            return self.config.model, None
        if name in self.config.loras:
            return name, name
        if self.config.any_model:
            return name, None
        raise ApiError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")

    def _set_fault(self, fault: Fault) -> None:
        self.faults.set(fault)
        for driver in self.drivers:
            driver.engine.slow = self.faults.slow

    @web.middleware
    async def _errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ApiError, EngineDeadError) as failure:
            error = failure if isinstance(failure, ApiError) else ApiError(500, "EngineDeadError", "the engine failed")
            self.refused[error.status] += 1
            return web.Response(status=error.status, body=error_body(error), content_type=JSON)

    async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-engine"] = self.config.name

    async def _models(self, _: web.Request) -> web.Response:
        names = (self.config.model, *self.config.loras)
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": self.config.flavour,
                "root": name,
                "parent": None if name == self.config.model else self.config.model,
                "max_model_len": self.config.limits.context_length,
            }
            for name in names
        ]
        return _json({"object": "list", "data": cards})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if any(driver.dead for driver in self.drivers) else 200)

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        body = exposition(self.config, self.drivers, time.time())
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _stats(self, _: web.Request) -> web.Response:
        return _json(self.stats())

    async def _faults(self, request: web.Request) -> web.Response:
        try:
            fault = msgspec.json.decode(await request.read(), type=Fault)
        except msgspec.DecodeError as error:
            raise bad_request(f"the body is no fault: {error}") from None
        self._set_fault(fault)
        return _json(fault)

    async def _tokenize(self, request: web.Request) -> web.Response:
        model, tokens, texts = openai.tokenize(await request.read())
        self._model(model)
        limit = self.config.limits.context_length
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens.tolist(), "token_strs": texts})

    async def _reset(self, _: web.Request) -> web.Response:
        """Empty the cache. Like vLLM, answer 200 also when running requests prevent it."""
        done = [driver.engine.reset_prefix_cache() for driver in self.drivers]
        return _json({"reset": all(done)})

    async def _kv_event_sources(self, _: web.Request) -> web.Response:
        return _json({str(publisher.rank): publisher.source() for publisher in self._publishers})

    async def _kv_event_faults(self, request: web.Request) -> web.Response:
        try:
            faults = msgspec.json.decode(await request.read(), type=EventFaults)
        except msgspec.DecodeError as error:
            raise bad_request(f"the body is no fault: {error}") from None
        for publisher in self._publishers:
            publisher.faults = faults
        return _json(faults)

    async def _restart(self, _: web.Request) -> web.Response:
        """Do what a new process would: empty caches, metrics and events from the beginning, requests broken off."""
        for publisher in self._publishers:
            publisher.close()
        for rank, driver in enumerate(self.drivers):
            driver.restart(self._engine(rank))
        self._stored.clear()
        self._set_fault(self.faults.fault)
        for publisher in self._publishers:
            await publisher.restart()
        return _json({"restarted": True})


def _json(value: Any) -> web.Response:
    return web.Response(body=encode_json(value), content_type=JSON)


def _total(usages: Sequence[Usage]) -> Usage:
    return sum(usages, Usage(0, 0, 0))


def _texts(generation: Generation) -> list[str]:
    return [_text(member, 0, member.total - member.request.prompt_tokens) for member in generation.members]


def _text(member: Running, first: int, last: int) -> str:
    start = member.request.prompt_tokens
    return decode(member.request.content.tokens[start + first : start + last])


async def _misbehave(fault: Fault, request: web.Request) -> None:
    """Break the connection, or wait until the client or the end of the server does."""
    if fault.mode == "abort" and request.transport is not None:
        request.transport.abort()
    await asyncio.Event().wait()
