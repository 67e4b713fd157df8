"""What a sidecar predicts of its engine, fed by the events that it follows anyway."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from aiohttp import web

from picker.app.sidecar_settings import SidecarSettings
from picker.core.block_hashes.prompts import PromptHashes
from picker.core.block_index.index import BlockIndex
from picker.core.plugins.kvcache_args import KvCacheArgs, Way
from picker.core.tokens.prompt import ModelNames
from picker.io.keep import keep
from picker.io.kv_events.rank import RankSubscription
from picker.io.kvcache.oracle import EngineHolder, Oracle
from picker.io.kvcache.sources import EngineFeed
from picker.io.kvcache.tokenizers import open_tokenizers
from picker.io.predict import Gate, PredictSettings, prediction_app
from picker.io.tokenize.chain import ChainSettings, TokenizerChain
from picker.io.tokenize.remote import Target

_SWEEP_SECONDS = 0.05
_DEADLINE = 1.0
"""Seconds that tokenizing may take; nobody's request waits for it."""


class SidecarPredictions:
    """Give `feed` the engine's events and mount `apps`; use it as an asynchronous context manager.

    Without the sidecar's bearer token only its own machine may ask. `ranks` are those whose events it is given.
    """

    def __init__(self, settings: SidecarSettings) -> None:
        self.ranks: Sequence[RankSubscription] = ()
        self.index = BlockIndex()
        self.feed = EngineFeed(self.index, 0)
        self.gate = Gate(PredictSettings(settings.token, loopback_only=not settings.token))
        self._settings = settings
        self._chain: TokenizerChain | None = None
        self._stack = AsyncExitStack()
        names = PromptHashes(settings.hash_protocol, settings.hash_seed)
        holder = EngineHolder(self.index, settings.pod, self._is_complete, prompt_hashes=names)
        self.apps: Mapping[str, web.Application] = {
            "/v1/cache": prediction_app(Oracle(lambda: self._chain, lambda: holder), self.gate)
        }

    async def __aenter__(self) -> Self:
        settings = self._settings
        self.feed.open(settings.source.ranks)
        engine = [Target(settings.base_url.rstrip("/"))]
        names = ModelNames((settings.model,) if settings.model else ())
        chain = await open_tokenizers(KvCacheArgs(tokenizers=(Way.ENGINE,)), lambda: engine, self._stack)
        chain.settings = ChainSettings(_DEADLINE, _DEADLINE, names=names)
        self._chain = chain
        sweeping = asyncio.create_task(keep("prediction_sweep", self._sweep))
        self._stack.callback(sweeping.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _is_complete(self) -> bool:
        return bool(self.ranks) and all(rank.connected and rank.complete for rank in self.ranks)

    async def _sweep(self) -> None:
        while True:
            busy = self.index.sweep(500)
            await asyncio.sleep(0 if busy else _SWEEP_SECONDS)
