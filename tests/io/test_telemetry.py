"""Who hears of a decision, and that nobody who listens or does not can harm the request path."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import msgspec
import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.core.exchange.effects import Anomaly
from picker.core.scheduling.decision import Decision
from picker.io.telemetry import (
    MAX_WATCHERS,
    RECENT_DECISIONS,
    WATCHER_QUEUE,
    TooManyWatchersError,
    configure_logging,
)

SECRET = "my bank PIN is 1234"


async def take(watcher, count: int) -> list[int]:
    numbers = []
    async with asyncio.timeout(5):
        async for record in watcher:
            numbers.append(record.number)
            if len(numbers) == count:
                return numbers
    raise AssertionError


async def test_a_slow_watcher_loses_decisions_and_the_loss_is_counted(stack) -> None:
    with stack.hub.watch() as watcher:
        for _ in range(WATCHER_QUEUE + 10):
            stack.decide("hello")
        assert stack.metrics.watch_lost.series[()] == 10
        assert await take(watcher, WATCHER_QUEUE) == list(range(1, WATCHER_QUEUE + 1))
        stack.decide("hello")
        assert await take(watcher, 1) == [WATCHER_QUEUE + 11]
    for _ in range(WATCHER_QUEUE + 10):
        stack.decide("hello")
    assert stack.metrics.watch_lost.series[()] == 10, "who left loses nothing"


async def test_a_watcher_sees_its_model_only(stack) -> None:
    with stack.hub.watch("b") as watcher:
        for model in ("a", "b", "a", "b"):
            stack.decide("hello", model)
        assert await take(watcher, 2) == [2, 4]


def test_watchers_are_limited(stack) -> None:
    watching = [stack.hub.watch() for _ in range(MAX_WATCHERS)]
    for each in watching:
        each.__enter__()
    with pytest.raises(TooManyWatchersError, match="close one"), stack.hub.watch():
        pass
    watching[0].__exit__(None, None, None)
    with stack.hub.watch():
        pass


def test_recent_decisions_are_bounded_and_hold_no_prompt(stack, logs) -> None:
    path = "/v1/completions?api_key=k-123"
    for _ in range(RECENT_DECISIONS + 5):
        stack.decide(SECRET, path=path, request_id="r" * 5000)
    assert [record.number for record in stack.hub.recent] == list(range(6, RECENT_DECISIONS + 6))
    record = stack.hub.recent[-1]
    assert record.decision.request.prompt.texts == ()
    assert record.decision.matches == {}
    shown = msgspec.json.encode(record.view()).decode() + str(logs.entries)
    for hidden in (SECRET, "k-123", "r" * 1000):
        assert hidden not in shown
    view = record.view()
    assert view["path"] == "/v1/completions"
    assert view["reason"] == "routed"
    assert view["endpoints"][0]["plugins"][1] == {
        "plugin": "prefix-cache", "weight": 2.0, "score": 0.0, "matched": 0, "total": 1, "unit": "blocks",
    }  # fmt: skip


def test_every_decision_is_logged_at_debug_and_one_in_n_at_info(logs, make_stack: Callable[..., object]) -> None:
    stack = make_stack(sample_decisions=3)
    for _ in range(7):
        stack.decide("hello")
    assert [entry["log_level"] for entry in logs.entries] == ["debug", "debug", "info"] * 2 + ["debug"]
    entry = logs.entries[0]
    assert entry["request_id"] == "id-1"
    assert entry["scores"]["default/pod-a"]["least-request"] == 100
    assert entry["matched"] == {"prefix-cache": "0/1 blocks"}


def test_nothing_is_built_for_a_log_that_nobody_reads(
    make_stack: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Decision] = []

    def view(decision: Decision) -> dict[str, object]:
        built.append(decision)
        return {}

    monkeypatch.setattr(Decision, "view", view)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    try:
        stack = make_stack()
        stack.decide("hello")
    finally:
        structlog.reset_defaults()
    assert built == []
    assert len(stack.hub.recent) == 1


def test_anomalies_are_logged_at_a_bounded_rate_and_say_the_remedy(logs, make_stack: Callable[..., object]) -> None:
    now = 100.0
    stack = make_stack(monotonic=lambda: now)
    for _ in range(1000):
        stack.hub.anomaly(Anomaly.STREAMED_REQUEST_BODY, "")
    stack.hub.anomaly(Anomaly.CONTROL_HEADER, "x-gateway-destination-endpoint")
    now = 110.0
    stack.hub.anomaly(Anomaly.STREAMED_REQUEST_BODY, "")
    now = 120.0
    stack.hub.anomaly(Anomaly.STREAMED_REQUEST_BODY, "")
    first, other, again, last = logs.entries
    assert first["log_level"] == "warning"
    assert "FULL_DUPLEX_STREAMED" in first["event"]
    assert "BUFFERED" in first["event"]
    assert [entry["suppressed"] for entry in (first, again, last)] == [0, 999, 0]
    assert other["detail"] == "x-gateway-destination-endpoint"
    assert stack.metrics.anomalies.series["streamed_request_body",] == 1002


def test_nothing_escapes_to_the_request_path(stack, logs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("disk full")

    decision = stack.decide("hello")
    monkeypatch.setattr(stack.metrics, "decided", broken)
    monkeypatch.setattr(stack.metrics, "finished", broken)
    stack.hub.decided(decision)
    stack.hub.finished(decision.sent, None, 1.0)
    stack.hub.failed("learn", ValueError("x"))
    assert stack.metrics.errors.series == {("telemetry",): 2, ("learn",): 1}
    errors = [entry for entry in logs.entries if entry["log_level"] == "error"]
    assert [entry["where"] for entry in errors] == ["telemetry", "learn"]
    logs_fail = [entry for entry in logs.entries if "exc_info" in entry]
    assert isinstance(logs_fail[0]["exc_info"], RuntimeError)


@pytest.fixture
def real_logging() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


FORGED_LINE = 'evil\n{"level":"error"}\r'
COLOUR = "\x1b[31mred"


@pytest.mark.usefixtures("real_logging")
@pytest.mark.parametrize("model", [FORGED_LINE, COLOUR])
@pytest.mark.parametrize("form", ["json", "console"])
def test_a_model_name_can_neither_forge_a_line_nor_colour_a_terminal(
    form: str, model: str, capsys: pytest.CaptureFixture[str], make_stack: Callable[..., object]
) -> None:
    configure_logging("debug", form)
    make_stack().decide(SECRET, model)
    logging.getLogger("library").warning("model %s", "plain")
    first, second = capsys.readouterr().err.splitlines()
    assert "\x1b" not in first
    assert SECRET not in first
    assert "model plain" in second
    if form == "json":
        entry = json.loads(first)
        assert (entry["level"], entry["event"], entry["model"]) == ("debug", "decision", model)
        assert json.loads(second)["level"] == "warning"


@pytest.mark.usefixtures("real_logging")
async def test_http_2_on_an_http_1_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    server = TestServer(web.Application())
    await server.start_server(access_log=None)
    for _ in range(3):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.")
        writer.close()
    await server.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) < 250
    assert "no HTTP/1 request" in json.loads(line)["event"]


@pytest.mark.usefixtures("real_logging")
@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_values(
    form: str, capsys: pytest.CaptureFixture[str], make_stack: Callable[..., object]
) -> None:
    configure_logging("info", form)
    stack = make_stack()

    def fail(prompt: str) -> None:
        raise RuntimeError(f"cannot {len(prompt)}")

    try:
        fail(SECRET)
    except RuntimeError as error:
        stack.hub.failed("decide", error)
    written = capsys.readouterr().err
    assert "RuntimeError: cannot 19" in written
    assert SECRET not in written


class Clock:
    """An event loop's `call_later`, in the hands of a test."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def later(self, act: Callable[[], None]) -> None:
        self.due.append(act)

    def tick(self) -> None:
        due, self.due = self.due, []
        for act in due:
            act()


def counted(stack) -> int:
    return sum(stack.metrics.decisions.series.values())


def test_news_wait_for_their_time_and_keep_their_order(make_stack) -> None:
    clock = Clock()
    stack = make_stack(later=clock.later)
    stack.serve("hello")
    stack.serve("hello")
    assert counted(stack) == 0
    clock.tick()
    assert counted(stack) == 2
    assert [record.number for record in stack.hub.recent] == [1, 2]
    # The model got its label when its first request was over, which came before the second decision.
    assert stack.metrics.decisions.series["routed", "m"] == 1
    stack.serve("hello")
    clock.tick()
    assert counted(stack) == 3


def test_whoever_looks_sees_all_there_is(make_stack) -> None:
    stack = make_stack(later=lambda _: None)
    stack.decide("hello")
    assert len(stack.hub.recent) == 1
    stack.decide("hello")
    stack.hub.settle()
    assert counted(stack) == 2


async def test_a_new_watcher_sees_nothing_from_before(make_stack) -> None:
    stack = make_stack(later=lambda _: None)
    stack.decide("before")
    with stack.hub.watch() as watcher:
        stack.decide("after")
        stack.hub.settle()
        assert await take(watcher, 1) == [2]


def test_few_news_wait_and_few_prompts(make_stack) -> None:
    stack = make_stack(later=lambda _: None)
    for _ in range(WATCHER_QUEUE):
        stack.decide("hello")
    assert counted(stack) >= WATCHER_QUEUE // 2
    stack.hub.settle()
    before = counted(stack)
    for _ in range(5):
        stack.decide("h" * 1_000_000)
    assert counted(stack) == before + 5, "more than 4 MiB of prompts do not wait"
