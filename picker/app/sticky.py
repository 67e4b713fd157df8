"""The part of a picker that is there while sessions stick to endpoints."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from picker.app.config_sticky import SessionSticky, StickyBackend
from picker.app.kvcache import Keep
from picker.core.director import Director
from picker.core.plugins.kvcache_args import RedisArgs
from picker.core.sticky import Bindings, StickySessions, StickySettings
from picker.io.kv_index.redis_client import ClientSettings, RedisClient
from picker.io.kvcache.redis import redis_settings
from picker.io.sticky.redis import RedisBindings

_SETTLE_SECONDS = 0.5


class StickyPart:
    """Follows the configuration; what is bound stays bound through its changes."""

    def __init__(self, director: Director, keep: Keep) -> None:
        self._director = director
        self._keep = keep
        self._memory: Bindings | None = None
        self._redis: RedisBindings | None = None
        self._redis_args: RedisArgs | None = None
        self._task: asyncio.Task[None] | None = None

    def configure(self, config: SessionSticky) -> None:
        """Put a configuration in force."""
        director = self._director
        if not config.sources:
            director.sticky = self._memory = None
            self._follow_redis(config, None)
            return
        seconds = float(config.session_affinity_seconds)
        memory = self._memory = self._memory or Bindings(seconds, config.max_sessions)
        memory.seconds, memory.most = seconds, config.max_sessions
        settings = StickySettings(config.sources, config.model_server)
        self._follow_redis(config, memory)
        sticky = director.sticky = director.sticky or StickySessions(settings, memory, director.now)
        sticky.settings = settings
        sticky.store, sticky.lookup = self._redis or memory, self._redis

    async def stop(self) -> None:
        """End everything, once Redis knows what is bound."""
        if self._redis is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._redis.settle(), _SETTLE_SECONDS)
        task = self._task
        self._end_redis()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _follow_redis(self, config: SessionSticky, memory: Bindings | None) -> None:
        if memory is None or config.backend is not StickyBackend.REDIS:
            self._end_redis()
            return
        short_name = config.model_server.rpartition("/")[2]
        if self._redis is None or self._redis_args != config.redis:
            self._end_redis()
            client = RedisClient(
                redis_settings(config.redis, os.environ),
                ClientSettings(budget=config.redis.budget_seconds),
                without="sessions are bound in memory",
            )
            self._redis_args = config.redis
            self._redis = RedisBindings(client, memory, short_name, self._director.now)
            self._task = self._keep("sticky", client.run)
        self._redis.model_server = short_name

    def _end_redis(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task = self._redis = self._redis_args = None
