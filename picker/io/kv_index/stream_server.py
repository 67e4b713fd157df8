"""The sidecar's streams: every registered router gets all that the engine holds, and from then on what changes."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter, deque
from collections.abc import Callable, Iterator

import structlog
from aiohttp import web
from msgspec import Struct

from picker.core.kv_events.events import EventBatch
from picker.core.kv_index.ownership import Changes, Ownership
from picker.core.kv_index.stream_protocol import (
    EXTENSION,
    HEARTBEAT,
    LINE_EVENTS,
    MAX_REGISTRATION_BYTES,
    RegistrationError,
    change_lines,
    extension_line,
    parse_registration,
    snapshot_lines,
)

logger = structlog.get_logger(__name__)

REGISTER = "/kvcache/routers/register"


class StreamSettings(Struct, frozen=True):
    """Times in seconds."""

    heartbeat: float = 10.0
    most_streams: int = 128
    queue_bytes: int = 16 << 20
    """Lines that wait for one router, beyond the snapshot."""
    stalled: float = 1.0
    """How long a router may read nothing."""
    token: str = ""
    """What callers must bring as bearer token; empty: nothing."""


class _Stream:
    """One response. Lines go in at one end; `ended` says why no more will."""

    def __init__(self, router: str, *, extended: bool) -> None:
        self.router = router
        self.extended = extended
        self.ended = ""
        self.snapshot: deque[bytes] = deque()
        self.lines: deque[bytes] = deque()
        self.waiting = 0
        """Bytes in `lines`."""
        self.wake = asyncio.Event()

    def put(self, line: bytes) -> None:
        self.lines.append(line)
        self.waiting += len(line)
        self.wake.set()

    def take(self) -> bytes | None:
        if self.snapshot:
            return self.snapshot.popleft()
        if not self.lines:
            return None
        line = self.lines.popleft()
        self.waiting -= len(line)
        return line

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self.wake.set()


class StreamServer:
    """Streams of one engine's ownership. `apply` and `begin` are told what happens to it, and make it happen.

    While a snapshot is taken, in slices, what happens waits. `counts`: `registered`, and streams by how they ended:
    `replaced`, `queue_full`, `stalled`, `closed` (by the router), `stopped`; and registrations refused as `unauthorized`,
    `bad_request`, `too_many`.
    """

    def __init__(self, ownership: Ownership, owner: str, settings: StreamSettings = StreamSettings()) -> None:  # noqa: B008 (frozen)
        self.counts: Counter[str] = Counter()
        self._ownership = ownership
        self._owner = owner
        self._settings = settings
        self._streams: dict[str, _Stream] = {}
        self._responding = 0
        self._since: dict[int, int] = {}
        self._snapshot = asyncio.Lock()
        self._held_back: deque[Callable[[], None]] | None = None

    @property
    def streams(self) -> int:
        """Responses that have not exited, those of replaced streams included."""
        return self._responding

    def do(self, change: Callable[[], None]) -> None:
        """Change the ownership now, or as soon as the snapshot under way is taken."""
        if self._held_back is None:
            change()
        else:
            self._held_back.append(change)

    def changed(self, changes: Changes, rank: int, batch: EventBatch) -> None:
        """Tell the routers what a batch changed. To be called from within `do`."""
        self._since.setdefault(rank, 0)  # a rank that is known from its first batch on does not begin anew
        lines = b"".join(change_lines(self._owner, changes.changes))
        events = b""
        if any(stream.extended for stream in self._streams.values()):
            events = extension_line(rank=rank, ts=batch.timestamp, events=batch.events)
        self._tell(lines, events)

    def refreshed(self, changes: Changes) -> None:
        """Tell the routers of blocks that are still held. To be called from within `do`."""
        self._tell(b"".join(change_lines(self._owner, changes.changes)), b"")

    def begun(self, changes: Changes, rank: int, since: int) -> None:
        """Tell the routers that a rank begins anew with batch `since`. To be called from within `do`."""
        self._since[rank] = since
        lines = b"".join(change_lines(self._owner, changes.changes))
        self._tell(lines, extension_line(rank=rank, begin=since))

    async def register(self, request: web.Request) -> web.StreamResponse:
        """Answer a registration: with the stream, or with 400, 401, or 503 when there are too many."""
        if self._settings.token and not _has_token(request, self._settings.token):
            return self._refuse(401, "unauthorized", "Authorization: send the sidecar's bearer token")
        try:
            registration = parse_registration(await _body(request))
        except RegistrationError as error:
            return self._refuse(400, "bad_request", str(error))
        router = registration.router_id
        replaced = self._streams.get(router)
        if replaced is not None:
            replaced.end("replaced")
        if self._responding >= self._settings.most_streams:
            return self._refuse(503, "too_many", f"{self._responding} streams are open; try again later")
        self._responding += 1
        stream = _Stream(router, extended=EXTENSION in registration.accept)
        try:
            return await self._respond(request, stream)
        finally:
            self._responding -= 1
            if self._streams.get(router) is stream:
                del self._streams[router]
            self.counts[stream.ended or "closed"] += 1
            logger.info("Router stream ended", id=router, reason=stream.ended or "closed")

    def stop(self) -> None:
        """End all streams."""
        for stream in self._streams.values():
            stream.end("stopped")

    def _refuse(self, status: int, reason: str, detail: str) -> web.Response:
        self.counts[reason] += 1
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        return web.json_response({"detail": detail}, status=status, headers=headers)

    async def _respond(self, request: web.Request, stream: _Stream) -> web.StreamResponse:
        headers = {"Content-Type": "application/x-ndjson", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await self._join(stream)
        self.counts["registered"] += 1
        logger.info(f"Router registered: id={stream.router}", extended=stream.extended)  # noqa: G004 (Kthena's words)
        try:
            while not stream.ended:
                if (line := stream.take()) is not None:
                    await self._send(response, line)
                    continue
                stream.wake.clear()
                try:
                    async with asyncio.timeout(self._settings.heartbeat):
                        await stream.wake.wait()
                except TimeoutError:
                    await self._send(response, HEARTBEAT)
            async with asyncio.timeout(self._settings.stalled):
                await response.write_eof()
        except TimeoutError:
            stream.end("stalled")
            _abort(request)
        except ConnectionError:
            stream.end("closed")
        return response

    async def _send(self, response: web.StreamResponse, line: bytes) -> None:
        async with asyncio.timeout(self._settings.stalled):
            await response.write(line)

    async def _join(self, stream: _Stream) -> None:
        """Give a stream all there is, and from then on what changes."""
        async with self._snapshot:
            self._held_back = deque()
            try:
                for line in self._all_lines(stream.extended):
                    stream.snapshot.append(line)
                    await asyncio.sleep(0)
                other = self._streams.get(stream.router)
                if other is not None:
                    other.end("replaced")
                self._streams[stream.router] = stream
            finally:
                held_back, self._held_back = self._held_back, None
                for change in held_back:
                    self._do_held_back(change)

    def _do_held_back(self, change: Callable[[], None]) -> None:
        try:
            change()
        except Exception:  # one that fails must not keep the others from being done
            self.counts["apply_errors"] += 1
            logger.exception("An event that was held back could not be applied")

    def _all_lines(self, extended: bool) -> Iterator[bytes]:
        if extended:
            yield extension_line(version=1)
        yield from snapshot_lines(self._owner, self._ownership)
        if extended:
            for rank, since in self._since.items():
                yield extension_line(rank=rank, begin=since)
                for events in self._ownership.replay(rank, LINE_EVENTS):
                    yield extension_line(rank=rank, ts=0.0, events=events)

    def _tell(self, lines: bytes, extension: bytes) -> None:
        for router, stream in list(self._streams.items()):
            told = lines + extension if stream.extended else lines
            if not told or stream.ended:
                continue
            if stream.waiting + len(told) > self._settings.queue_bytes:
                logger.warning(f"KV event queue of router {router} is full; ending its stream")  # noqa: G004 (as above)
                stream.end("queue_full")
                del self._streams[router]
                continue
            stream.put(told)


async def _body(request: web.Request) -> bytes:
    body = await request.content.read(MAX_REGISTRATION_BYTES + 1)
    while len(body) <= MAX_REGISTRATION_BYTES and (more := await request.content.read(MAX_REGISTRATION_BYTES + 1)):
        body += more
    if len(body) > MAX_REGISTRATION_BYTES:
        raise RegistrationError(f"the body has more than {MAX_REGISTRATION_BYTES} bytes")
    return body


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
