"""Where the request path's news go: metrics always, recent decisions, watchers and the log as far as wanted.

Nothing here waits, raises or keeps prompts. Views of decisions are built only for those who look.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import structlog
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from picker.core.exchange.effects import Anomaly, Finish
from picker.core.prompts import Prompt
from picker.core.scheduling.api import Request
from picker.core.scheduling.decision import Decision, Sent
from picker.io.afterwards import Afterwards, Later
from picker.io.metrics import Metrics

RECENT_DECISIONS = 256
MAX_WATCHERS = 8
WATCHER_QUEUE = 64
"""Decisions that wait for one watcher; those that come while it is full are lost to it."""
LOG_EVERY_SECONDS = 10.0
"""Least distance of two log lines about the same kind of trouble."""

_MOST_WAITING = WATCHER_QUEUE // 2
"""News that wait to be dealt with at one go; half of what a watcher that keeps up can take."""
_MOST_WAITING_BYTES = 4 * 1024 * 1024
"""Of request bodies, whose prompts wait along with their decisions."""
_MAX_TEXT = 256
_LOGGED_ENDPOINTS = 16

_REMEDIES: dict[Anomaly, str] = {
    Anomaly.STREAMED_REQUEST_BODY: (
        "Envoy sends request bodies in mode STREAMED: every request is routed BLIND, without its prompt, because the "
        "destination is fixed before the body comes. Set processing_mode.request_body_mode of the ext_proc filter "
        "to FULL_DUPLEX_STREAMED (with request_trailer_mode SEND) or to BUFFERED"
    ),
    Anomaly.MODE_UNKNOWN: (
        "Envoy does not say in which mode it sends bodies; it is older than the first version that does. "
        "Use a newer Envoy, or body mode BUFFERED"
    ),
    Anomaly.BODY_TOO_LARGE: (
        "a request body is larger than the picker keeps; it is routed by its beginning or by load alone. "
        "Raise the limit if such requests are meant to be"
    ),
    Anomaly.MALFORMED_MESSAGE: (
        "a message on the ext_proc port was no ProcessingRequest, and its stream was ended. Let only Envoy connect to "
        "this port, and look for what changes messages on the way"
    ),
    Anomaly.CONTROL_HEADER: (
        "a client sent a header that steers routing; it was removed. "
        "Strip these headers in Envoy before the ext_proc filter, as the shipped configurations do"
    ),
}


class Record(Struct, frozen=True):
    """One decision in memory: `decision` without its prompt, what is too long in it cut. `time` is Unix seconds."""

    number: int
    time: float
    decision: Decision

    def view(self) -> dict[str, Any]:
        """The record as plain values."""
        return {"number": self.number, "time": self.time, **self.decision.view()}


class Watcher:
    """One listener's queue. Iterate over it for the records that it was fast enough to get."""

    def __init__(self, model: str, lost: Callable[[], None]) -> None:
        self._model = model
        self._lost = lost
        self._queue: asyncio.Queue[Record] = asyncio.Queue(WATCHER_QUEUE)

    def offer(self, record: Record) -> None:
        if self._model and record.decision.request.prompt.model != self._model:
            return
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            self._lost()

    async def __aiter__(self) -> AsyncIterator[Record]:
        while True:
            yield await self._queue.get()


class TooManyWatchersError(Exception):
    """`MAX_WATCHERS` are watching already."""


class Hub:
    """Implements `core.telemetry.Telemetry`.

    `sample_decisions` is N where one in N decisions is logged at info; 0 logs none there. At debug all are. `clock`
    gives Unix seconds, `monotonic` the seconds by which log lines are spaced. Decisions and ends of requests are dealt with
    `later`, many at a time, which takes half as long as one by one between other work; without it at once.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        sample_decisions: int = 0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        later: Later | None = None,
    ) -> None:
        self.metrics = metrics
        self._recent: deque[Record] = deque(maxlen=RECENT_DECISIONS)
        self._afterwards = Afterwards(partial(self.failed, "telemetry"), later, most=_MOST_WAITING)
        self._waiting_bytes = 0
        self._clock = clock
        self._number = 0
        self._watchers: list[Watcher] = []
        self.follow_logging(sample_decisions)
        self._pace = _Pace(monotonic)

    @property
    def recent(self) -> deque[Record]:
        """The last `RECENT_DECISIONS` decisions."""
        self.settle()
        return self._recent

    def settle(self) -> None:
        """Deal with all that was told up to now."""
        self._waiting_bytes = 0
        self._afterwards.run()

    def decided(self, decision: Decision) -> None:
        self._afterwards.add(self._decided, decision)
        # Decisions that wait hold their prompts.
        self._waiting_bytes += decision.request.body_bytes
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            self.settle()

    def finished(self, sent: Sent, finish: Finish, seconds: float) -> None:
        self._afterwards.add(self.metrics.finished, sent, finish, seconds)

    def _decided(self, decision: Decision) -> None:
        self.metrics.decided(decision)
        number = self._number = self._number + 1
        record = Record(number, self._clock(), without_prompt(decision))
        self._recent.append(record)
        for watcher in self._watchers:
            watcher.offer(record)
        if self.sample_decisions and number % self.sample_decisions == 0:
            self._log.info("decision", **_log_fields(record.decision))
        elif self._logs_all:
            self._log.debug("decision", **_log_fields(record.decision))

    def anomaly(self, anomaly: Anomaly, detail: str) -> None:
        try:
            self.metrics.anomalies.add(anomaly)
            suppressed = self._pace.due(anomaly)
            if suppressed is not None:
                text = _REMEDIES.get(anomaly, "an ext_proc stream did not follow the protocol")
                fields = {"detail": _cut(detail)} if detail else {}
                self._log.warning(text, anomaly=str(anomaly), suppressed=suppressed, **fields)
        except Exception as error:  # noqa: BLE001  telemetry never fails a request
            self.failed("telemetry", error)

    def failed(self, where: str, error: BaseException) -> None:
        try:
            self.metrics.errors.add(where)
            suppressed = self._pace.due(where)
            if suppressed is not None:
                self._log.error("unexpected error, survived", where=where, suppressed=suppressed, exc_info=error)
        except Exception:  # noqa: BLE001  there is nobody left to tell but the counter
            self.metrics.errors.add("log")

    def follow_logging(self, sample_decisions: int) -> None:
        """Log by what `configure_logging` set last, and one in so many decisions at info."""
        self.sample_decisions = sample_decisions
        self._log = structlog.get_logger("picker").bind()
        self._logs_all = self._log.is_enabled_for(logging.DEBUG)

    @contextmanager
    def watch(self, model: str = "") -> Iterator[Watcher]:
        """Get the decisions for a model, or all, from now on. Raises TooManyWatchersError."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyWatchersError(f"{MAX_WATCHERS} watchers are connected already; close one first")
        self.settle()
        watcher = Watcher(model, self.metrics.watch_lost.add)
        self._watchers.append(watcher)
        try:
            yield watcher
        finally:
            self._watchers.remove(watcher)


class _Pace:
    """Spaces log lines of one kind; knows how many it held back since the last."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._next: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def due(self, kind: str) -> int | None:
        """How many lines were suppressed before the one that is due now; None to suppress this one, too."""
        now = self._monotonic()
        if now < self._next.get(kind, now):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return None
        self._next[kind] = now + LOG_EVERY_SECONDS
        return self._suppressed.pop(kind, 0)


def without_prompt(decision: Decision) -> Decision:
    """The same decision without anything that is secret or large: no prompt, no query string, no match state."""
    request = decision.request
    prompt = request.prompt
    return msgspec.structs.replace(
        decision,
        request=Request(
            _cut(request.request_id), _cut(request.path.partition("?")[0]), Prompt(prompt.model, (), prompt.unused)
        ),
        matches={},
        prefill=None if decision.prefill is None else without_prompt(decision.prefill),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _log_fields(decision: Decision) -> dict[str, Any]:
    view = decision.view()
    endpoints = view.pop("endpoints")
    counted = ("uncached_tokens", "queued_tokens", "cost_tokens") if decision.work is not None else ()
    scores = {
        f"{endpoint['namespace']}/{endpoint['name']}": {
            "total": endpoint["total"],
            "in_flight": endpoint["in_flight"],
            **{name: round(endpoint[name]) for name in counted},
            **{plugin["plugin"]: plugin["score"] for plugin in endpoint["plugins"]},
        }
        for endpoint in endpoints[:_LOGGED_ENDPOINTS]
    }
    matched = {
        plugin["plugin"]: f"{plugin['matched']}/{plugin['total']} {plugin['unit']}"
        for endpoint in endpoints[:1]
        for plugin in endpoint["plugins"]
        if plugin["unit"]
    }
    return {**view, "candidates": len(endpoints), "matched": matched, "scores": scores}


def configure_logging(level: str, format: Literal["json", "console"]) -> None:  # noqa: A002  the configuration's name
    """Send all logs to standard error: one JSON object a line, or coloured lines for people.

    `level` is `debug`, `info`, `warning` or `error`. Strings from outside are quoted, so that no request can forge
    a line or colour a terminal; tracebacks never show the values of variables.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor]
    if format == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    else:
        traceback = structlog.dev.plain_traceback
        colors = sys.stderr.isatty()
        last = [structlog.dev.ConsoleRenderer(colors=colors, repr_native_str=True, exception_formatter=traceback)]
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    remove_meta = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove_meta, *last]),
    )
    logging.getLogger("aiohttp.server").addFilter(_NOT_HTTP)
    # Libraries log at debug what no operator of the picker wants to read.
    logging.basicConfig(handlers=[handler], level=max(threshold, logging.INFO), force=True)


class _NotHttp(logging.Filter):
    """Makes one line, now and then, of aiohttp's tracebacks about clients that do not speak HTTP/1."""

    def __init__(self) -> None:
        super().__init__()
        self._pace = _Pace(time.monotonic)

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        suppressed = self._pace.due("not_http")
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = "a client of an HTTP port sent no HTTP/1 request (%s); %s more were not logged"
        record.args = (type(error).__name__, suppressed)
        record.exc_info = record.exc_text = None
        return suppressed is not None


_NOT_HTTP = _NotHttp()


def _json(event: Any, **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()
