"""Endpoints from Kubernetes: the ready pods of an InferencePool, or those that a label selector finds.

While the API server cannot be asked, the endpoints stay what they were: pods outlive it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from msgspec import Struct

from picker.core.endpoints import Endpoint
from picker.core.kubernetes.endpoints import EndpointFinder, Found
from picker.core.kubernetes.pods import PodFacts, read_pod
from picker.core.kubernetes.pools import PoolGroup, Selection, read_pool
from picker.core.kubernetes.watch import Random, Watch, WatchSettings
from picker.io.discovery.kubernetes_access import Access, AccessError, from_kubeconfig, in_cluster
from picker.io.discovery.kubernetes_api import ApiSettings, KubernetesApi

logger = structlog.get_logger(__name__)

_SETTLE_SECONDS = 0.02
"""Changes that come this close together are one change: what looks at all endpoints is done once for them."""
_MOMENT_SECONDS = 1.0

Source = Selection | str
"""Pods by selector and ports, or the name of an InferencePool."""


class KubernetesSettings(Struct, frozen=True, kw_only=True):
    """Which pods, and how they are asked for. An empty `namespace` is that of the credentials, an empty `kubeconfig`
    means those of the pod the picker runs in. `engine` is what pods run that do not say it, `engines` what they can.
    """

    source: Source
    namespace: str = ""
    group: PoolGroup = PoolGroup.V1
    kubeconfig: str = ""
    context: str = ""
    engine: str = "vllm"
    engines: tuple[str, ...] = ("vllm", "sglang")
    watch: WatchSettings = WatchSettings()
    api: ApiSettings = ApiSettings()


class KubernetesDiscovery:
    """Follows pods. `updates` counts the changes that were passed on, `odd` what is odd about pods now, by reason."""

    def __init__(self, settings: KubernetesSettings, rng: Random | None = None) -> None:
        self.updates = 0
        self.odd: Mapping[str, int] = {}
        self._settings = settings
        self._rng = rng or random.Random()
        self._access_problem = ""
        self._pool: Watch[Selection] | None = None
        self._pods: Watch[PodFacts] | None = None
        self._following: asyncio.Task[None] | None = None
        self._selection: Selection | None = None
        self._finder = EndpointFinder((), settings.engine, settings.engines)
        self._past: Counter[str] = Counter()
        self._passed_on: tuple[Endpoint, ...] | None = None
        self._changed = asyncio.Event()

    @property
    def failures(self) -> Counter[str]:
        """What went wrong when the API server was asked, by reason."""
        return sum((watch.failures for watch in self._watches), Counter(self._past))

    @property
    def problem(self) -> str:
        """What keeps the endpoints from being known as they are now, and what to do; empty when nothing does."""
        if self._access_problem:
            return self._access_problem
        for watch in self._watches:
            if watch.problem:
                return watch.problem + _remedy(watch.problem, self._settings)
        if self._pool is not None and self._pool.synced and self._selection is None:
            pool, group = self._settings.source, self._settings.group
            return (
                f"there is no usable InferencePool {pool} of {group}; apply it, or correct its name, namespace or group"
            )
        return ""

    def staleness(self) -> float:
        """Seconds since the API server last said something that holds; endless before it ever did."""
        return time.monotonic() - min((watch.confirmed_at for watch in self._watches), default=-float("inf"))

    async def run(self, on_change: Callable[[list[Endpoint]], None]) -> None:
        """Tell which endpoints there are once that is known, then after each change, until cancelled."""
        settings = self._settings
        self._forget()
        access = await self._find_access()
        namespace = settings.namespace or access.namespace
        async with KubernetesApi(access, settings.api) as api, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell(on_change))
            tasks.create_task(self._complain())

            def select(selection: Selection | None) -> None:
                """Follow other pods if it is others that are selected; those of before stay until these are known."""
                if selection is None or self._selection is None or selection.selector != self._selection.selector:
                    self._follow_other_pods(None if selection is None else selection.selector)
                    if self._pods is not None:
                        path = f"/api/v1/namespaces/{namespace}/pods"
                        self._following = tasks.create_task(api.follow(self._pods, path, self._changed.set))
                if selection is not None:
                    self._finder = EndpointFinder(selection.ports, settings.engine, settings.engines)
                self._selection = selection
                self._changed.set()

            if isinstance(settings.source, Selection):
                select(settings.source)
            else:
                one = {"fieldSelector": f"metadata.name={settings.source}"}
                pool = self._pool = Watch(partial(read_pool, group=settings.group), one, settings.watch, self._rng)
                path = f"/apis/{settings.group}/{settings.group.version}/namespaces/{namespace}/inferencepools"
                await api.follow(pool, path, lambda: select(next(iter(pool.objects.values()), None)))

    @property
    def _watches(self) -> list[Watch[Any]]:
        return [watch for watch in (self._pool, self._pods) if watch is not None]

    async def _find_access(self) -> Access:
        settings = self._settings
        while True:
            try:
                access = (
                    from_kubeconfig(Path(settings.kubeconfig), settings.context)
                    if settings.kubeconfig
                    else in_cluster()
                )
                access.tls()
            except AccessError as error:
                self._past["no_access"] += 1
                if str(error) != self._access_problem:
                    logger.warning("Kubernetes cannot be asked for endpoints", problem=str(error))
                self._access_problem = str(error)
                await asyncio.sleep(settings.watch.longest_pause)
            else:
                self._access_problem = ""
                return access

    def _forget(self) -> None:
        self._follow_other_pods(None)
        if self._pool is not None:
            self._past.update(self._pool.failures)
        self._pool = self._selection = None

    def _follow_other_pods(self, selector: str | None) -> None:
        if self._following is not None:
            self._following.cancel()
        if self._pods is not None:
            self._past.update(self._pods.failures)
        self._following = self._pods = None
        if selector is not None:
            self._pods = Watch(read_pod, {"labelSelector": selector}, self._settings.watch, self._rng)

    async def _tell(self, on_change: Callable[[list[Endpoint]], None]) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(_SETTLE_SECONDS)
            self._changed.clear()
            found = self._find()
            if found is not None:
                self.odd = found.odd
                if found.endpoints != self._passed_on:
                    on_change(list(found.endpoints))
                    self._passed_on = found.endpoints
                    self.updates += 1

    def _find(self) -> Found | None:
        if self._selection is None:
            return Found((), {}) if self._pool is not None and self._pool.synced else None
        if self._pods is None or not self._pods.synced:
            return None
        return self._finder.find(self._pods.objects)

    async def _complain(self) -> None:
        """Log what is wrong for longer than a moment, and that it is over."""
        said = ""
        while True:
            problem = self.problem
            await asyncio.sleep(_MOMENT_SECONDS)
            if self.problem != problem or problem == said:
                continue
            if problem:
                logger.warning("Kubernetes cannot be asked for endpoints; they stay what they were", problem=problem)
            else:
                logger.info("Kubernetes can be asked for endpoints again")
            said = problem


def _remedy(problem: str, settings: KubernetesSettings) -> str:
    match problem[:3]:
        case "401":
            return "; let the token be one that the API server takes"
        case "403":
            what = "pods" if isinstance(settings.source, Selection) else f"pods and inferencepools.{settings.group}"
            return f"; let a Role of the picker's ServiceAccount get, list and watch {what}"
        case "404":
            return f"; apply the custom resource definitions of {settings.group}, or name the group that is there"
    return ""
