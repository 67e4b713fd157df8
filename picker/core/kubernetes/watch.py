"""Keep a copy of a collection that an API server holds: list it, then watch it, and never believe a silent stream.

    ┌──────┐ all pages came  ┌───────┐
    │ list │────────────────▶│ watch │──┐ closed, cut, throttled: watch again from the last version
    └──────┘                 └───────┘◀─┘
        ▲                        │ expired, silent, malformed, or nothing came of three watches in a row
        └────────────────────────┘

A list is read page by page and takes the place of the copy once it is complete; until then, and for as long as the
API server cannot be asked, the copy stays what it was. Facts: the Kubernetes API concepts, "Efficient detection of
changes": versions are opaque, a version that is too old is answered with 410 (as a status, or as an ERROR frame in a
stream that was accepted), bookmarks move the version on, a watch ends after `timeoutSeconds`.

`Watch` does no I/O and has no clock: it says what to ask for, and is told what came of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from msgspec import Raw, Struct

from picker.core.kubernetes.objects import Bookmark, Frame, MalformedError, Named, Page, Status, decode

T = TypeVar("T")

MOST_OBJECTS = 10_000
_PAGE = "100"
"""Objects on a page: reading a page holds up everything else for some milliseconds."""
_FRUITLESS_WATCHES = 3
_LASTING_SECONDS = 10.0
"""A stream that lasted so long was a good one, whatever ended it."""
_NO_VERSION = ("", "0")


class Random(Protocol):
    """The part of `random.Random` that is used."""

    def random(self) -> float: ...


class Failure(StrEnum):
    """Why a list or a watch ended early; the label of a counter."""

    UNREACHABLE = "unreachable"
    CUT = "cut"
    SILENT = "silent"
    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    EXPIRED = "expired"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    THROTTLED = "throttled"
    SERVER_ERROR = "server_error"
    REFUSED = "refused"


_MISSED = (Failure.EXPIRED, Failure.SILENT, Failure.MALFORMED, Failure.TOO_LARGE)
"""After these the version is worth nothing: something may have been missed."""
_BY_CODE = {
    401: Failure.UNAUTHORIZED,
    403: Failure.FORBIDDEN,
    404: Failure.NOT_FOUND,
    410: Failure.EXPIRED,
    429: Failure.THROTTLED,
}


class WatchSettings(Struct, frozen=True):
    """Times in seconds. A watch is ended by the server after `watch`, and so is the belief in a copy that was listed
    `relist` ago. Pauses begin with `shortest_pause` and double up to `longest_pause`; one that the server asks for is
    kept up to `longest_wait`.
    """

    watch: float = 300.0
    relist: float = 1800.0
    shortest_pause: float = 0.1
    longest_pause: float = 1.0
    longest_wait: float = 30.0


class Get(Struct, frozen=True):
    """What to ask for after a pause in seconds: with `stream` the answer is frames, without it a page."""

    query: Mapping[str, str]
    stream: bool
    pause: float


class Watch(Generic[T]):
    """The copy is `objects`, by "namespace/name"; it means something once `synced`.

    `read` makes of the JSON of an object what is kept of it, or raises MalformedError: then the object is taken for
    not there, and counted. `selection` are the selectors of the query. `rng` keeps many pickers from asking in step.
    `failures` counts what went wrong by reason, `lists` and `frames` what came; `problem` says what is wrong now, and
    `confirmed_at` when the server last said something that holds.
    """

    def __init__(
        self, read: Callable[[Raw], T], selection: Mapping[str, str], settings: WatchSettings, rng: Random
    ) -> None:
        self.objects: dict[str, T] = {}
        self.synced = False
        self.confirmed_at = -float("inf")
        self.failures: Counter[str] = Counter()
        self.lists = 0
        self.frames = 0
        self.problem = ""
        self._read = read
        self._selection = dict(selection)
        self._settings = settings
        self._rng = rng
        self._version = ""
        self._listed_at = -float("inf")
        self._listing: dict[str, T] = {}
        self._more = ""
        self._asked_at = -float("inf")
        self._fruitless_watches = 0
        self._failures_in_a_row = 0
        self._pause = 0.0

    def ask(self, now: float) -> Get:
        """Return what to ask for next."""
        pause, self._pause = self._pause, 0.0
        self._asked_at = now + pause
        if not self._more and now - self._listed_at >= self._settings.relist:
            self._version = ""
        if not self._version:
            more = {"continue": self._more} if self._more else {}
            return Get({**self._selection, "limit": _PAGE, **more}, stream=False, pause=pause)
        seconds = max(1, int(self._settings.watch * (1 + self._rng.random()) / 2))
        watch = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        return Get({**self._selection, **watch, "resourceVersion": self._version}, stream=True, pause=pause)

    def page(self, body: bytes, now: float) -> bool:
        """Take in a page; returns whether the copy changed."""
        try:
            page = decode(body, Page)
        except MalformedError as error:
            self.failed(Failure.MALFORMED, str(error), now)
            return False
        if not page.metadata.more and page.metadata.resource_version in _NO_VERSION:
            self.failed(Failure.MALFORMED, "a list has no resourceVersion", now)
            return False
        for item in page.items or ():
            try:
                self._keep(self._listing, item)
            except MalformedError:
                self.failures["unusable_object"] += 1
        self.confirmed_at = now
        self._more = page.metadata.more
        if self._more:
            return False
        changed = not self.synced or self.objects != self._listing
        self.objects, self._listing = self._listing, {}
        self._version = page.metadata.resource_version
        self._listed_at = now
        self._fruitless_watches = 0
        self.synced = True
        self.lists += 1
        self.problem = ""
        return changed

    def frame(self, line: bytes, now: float) -> tuple[bool, bool]:
        """Take in a line of a stream; returns whether the copy changed, and whether the stream can go on."""
        try:
            frame = decode(line, Frame)
            if frame.type == "ERROR":
                status = decode(frame.object, Status)
                self.refused(status.code, status, None, now)
                return False, False
            changed = self._apply(frame)
        except MalformedError as error:
            self.failed(Failure.MALFORMED, str(error), now)
            return False, False
        self.frames += 1
        self.confirmed_at = now
        self.problem = ""
        self._fruitless_watches = self._failures_in_a_row = 0
        return changed, True

    def closed(self, now: float) -> None:
        """Note that a stream ended as streams do: at its time, or because the server stops."""
        self._again(now)

    def refused(self, code: int, status: Status, retry_after: float | None, now: float) -> None:
        """Note that the server answered with a status other than 200; `retry_after` is what its header says."""
        failure = _BY_CODE.get(code, Failure.SERVER_ERROR if code >= 500 else Failure.REFUSED)
        self.failed(failure, f"{code} {status.reason}: {status.message[:300]}", now)
        wanted = retry_after
        if wanted is None and status.details is not None:
            wanted = status.details.retry_after_seconds
        if wanted is not None and wanted > 0:
            self._pause = max(self._pause, min(wanted, self._settings.longest_wait) * (1 + self._rng.random() / 4))

    def failed(self, failure: Failure, text: str, now: float) -> None:
        """Note that asking failed, or that what came of it is of no use."""
        self.failures[failure] += 1
        self.problem = text
        if failure in _MISSED:
            self._start_over()
        self._again(now)

    def _again(self, now: float) -> None:
        """Have a pause before the next attempt, longer after each failure, until something comes or lasts."""
        settings = self._settings
        if self._lasted(now):
            self._failures_in_a_row = 0
        pause = settings.shortest_pause * 2.0 ** min(self._failures_in_a_row, 30)
        self._pause = min(pause, settings.longest_pause) * self._jitter()
        self._failures_in_a_row += 1
        if self._version:
            self._fruitless_watches += 1
            if self._fruitless_watches >= _FRUITLESS_WATCHES:
                self._start_over()

    def _lasted(self, now: float) -> bool:
        return bool(self._version) and now - self._asked_at > _LASTING_SECONDS

    def _start_over(self) -> None:
        self._version = self._more = ""
        self._listing = {}

    def _jitter(self) -> float:
        return (1 + self._rng.random()) / 2

    def _apply(self, frame: Frame) -> bool:
        match frame.type:
            case "ADDED" | "MODIFIED":
                version, changed = self._keep(self.objects, frame.object)
            case "DELETED":
                metadata = decode(frame.object, Named).metadata
                version = metadata.resource_version
                changed = self.objects.pop(metadata.key, None) is not None
            case "BOOKMARK":
                version, changed = decode(frame.object, Bookmark).metadata.resource_version, False
            case _:
                self.failures["unknown_frame"] += 1
                return False
        if version not in _NO_VERSION:
            self._version = version
        return changed

    def _keep(self, objects: dict[str, T], item: Raw) -> tuple[str, bool]:
        """Put an object into a copy; returns its version, and whether it is another than before."""
        metadata = decode(item, Named).metadata
        key, version = metadata.key, metadata.resource_version
        try:
            new = self._read(item)
        except MalformedError:
            self.failures["unusable_object"] += 1
            return version, objects.pop(key, None) is not None
        if key not in objects and len(objects) >= MOST_OBJECTS:
            self.failures["too_many_objects"] += 1
            return version, False
        changed = objects.get(key) != new
        objects[key] = new
        return version, changed
