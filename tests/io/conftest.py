from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import structlog
from msgspec import Struct
from structlog.testing import LogCapture

from picker.core.director import Director
from picker.core.endpoint_table import EndpointTable
from picker.core.endpoints import Endpoint
from picker.core.exchange.effects import BodyState, Decide, Finish, LearnedOn
from picker.core.plugins.prefix_cache_args import PrefixCacheArgs
from picker.core.plugins.profiles import Profile
from picker.core.plugins.registry import SchedulerSpec, build_scheduler
from picker.core.scheduling.decision import Decision
from picker.io.metrics import Metrics
from picker.io.telemetry import Hub

POD_A = Endpoint("pod-a", "10.0.0.1:8000")
POD_B = Endpoint("pod-b", "10.0.0.2:8000")


class Stack(Struct):
    """A real director with two endpoints, and its telemetry."""

    director: Director
    metrics: Metrics
    hub: Hub

    def decide(
        self,
        prompt: str,
        model: str = "m",
        *,
        path: str = "/v1/completions",
        request_id: str = "id-1",
        state: BodyState = BodyState.COMPLETE,
        subset: tuple[str, ...] | None = None,
    ) -> Decision:
        headers = {":path": path.encode(), "x-request-id": request_id.encode()}
        body = msgspec.json.encode({"model": model, "prompt": prompt})
        decision = self.director.decide(Decide(headers, body, state, None, subset))
        self.hub.decided(decision)
        return decision

    def serve(self, prompt: str, model: str = "m", *, status: int | None = 200, served: str | int = 0) -> Decision:
        decision = self.decide(prompt, model)
        ticket = self.director.route(decision)
        success = status == 200
        address = decision.destinations[served] if isinstance(served, int) else served
        finish = Finish(success, LearnedOn.RESPONSE_BODY, status, address)
        ticket.finish(finish)
        self.hub.finished(decision.sent, finish, 0.5)
        return decision


@pytest.fixture
def make_stack() -> Callable[..., Stack]:
    def make(*, capacity: int = 1000, profile: Profile | None = None, **hub: object) -> Stack:
        metrics = Metrics()
        spec = SchedulerSpec(
            filters=("least-request",),
            scorers=(("least-request", 1.0), ("prefix-cache", 2.0)),
            args={"prefix-cache": PrefixCacheArgs(maxHashCacheSize=capacity)},
        )
        if profile is not None:
            spec = SchedulerSpec(profile.filters, profile.scorers, profile.args, profile.producers)
        scheduler, _ = build_scheduler(spec, None, metrics.evicted)
        director = Director(scheduler, EndpointTable(), fallbacks=1, rng=random.Random(1), timer=time.perf_counter_ns)
        director.replace_endpoints([POD_A, POD_B])
        metrics.director = director
        return Stack(director, metrics, Hub(metrics, **hub))

    return make


@pytest.fixture
def stack(logs: LogCapture, make_stack: Callable[..., Stack]) -> Stack:  # noqa: ARG001
    return make_stack()


@pytest.fixture
def logs() -> Iterator[LogCapture]:
    """What is logged by loggers made from here on, at debug and above."""
    capture = LogCapture()
    structlog.configure(processors=[capture])
    yield capture
    structlog.reset_defaults()
