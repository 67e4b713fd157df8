"""The HTTP face of an API server: discovery, lists, watches and writes, for `kubectl` and for clients under test."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from contextlib import suppress

import yaml
from aiohttp import web

from tests.support.fake_kubernetes import discovery
from tests.support.fake_kubernetes.faults import Faults
from tests.support.fake_kubernetes.patches import patched
from tests.support.fake_kubernetes.resources import BUILT_IN, INFERENCE, Resource
from tests.support.fake_kubernetes.selectors import Object, selects
from tests.support.fake_kubernetes.storage import ApiError, Change, Storage, not_served
from tests.support.fake_kubernetes.streams import Stream, bookmark_line, frame_line, line_of


class FakeKubernetes:
    """An API server on loopback. `storage` can be written to directly, `faults` says what goes wrong.

    `requests` counts by verb and plural, `streams` are the watches that are open. `bookmark_seconds` is how often
    those get a bookmark; `watch_seconds` shortens `timeoutSeconds`.
    """

    def __init__(self, *more: Resource, bookmark_seconds: float = 60.0, watch_seconds: float = 3600.0) -> None:
        self.storage = Storage([*BUILT_IN, *INFERENCE, *more])
        self.faults = Faults()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.streams: set[Stream] = set()
        self.port = 0
        self._bookmark_seconds = bookmark_seconds
        self._watch_seconds = watch_seconds
        self._runner: web.AppRunner | None = None
        self.storage.on_change.append(self._tell)
        namespaces = self.resource("namespaces")
        for name in ("default", "kube-system"):
            self.storage.put(namespaces, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self, **user: str) -> str:
        """A kubeconfig for it, as YAML."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": "default"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": user}],
        }
        return yaml.safe_dump(document)

    def resource(self, plural: str, group: str | None = None) -> Resource:
        """A resource by its plural, in any group if none is named."""
        return next(
            one for one in self.storage.resources.values() if one.plural == plural and group in (None, one.group)
        )

    def apply(self, found: Object) -> Object:
        """Create or replace an object, as whoever may do everything."""
        group, _, version = found["apiVersion"].rpartition("/")
        resource = next(
            one
            for one in self.storage.resources.values()
            if (one.group, one.version, one.kind) == (group, version, found["kind"])
        )
        namespace = found["metadata"].get("namespace", "default") if resource.namespaced else ""
        return self.storage.put(resource, namespace, found)

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        app = web.Application(client_max_size=16 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        await web.SockSite(self._runner, listening).start()
        self.port = listening.getsockname()[1]

    async def stop(self) -> None:
        """Close the port and every connection: an outage. What is stored stays."""
        if self._runner is not None:
            self.cut_streams()
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def end_streams(self) -> None:
        """End every watch as a server does that has nothing more to say."""
        for stream in self.streams:
            stream.send(None)

    def cut_streams(self) -> None:
        """Abort the connection of every watch."""
        for stream in self.streams:
            if stream.transport is not None:
                stream.transport.abort()

    def mute_streams(self) -> None:
        """Let every open watch be silent from now on, without ending it."""
        for stream in self.streams:
            stream.mute()

    def send_to_streams(self, line: bytes) -> None:
        """Send something to every watch: an ERROR frame, or no frame at all."""
        for stream in self.streams:
            stream.send(line)

    def send_error_frame(self, code: int, reason: str = "Expired") -> None:
        """Send an ERROR frame to every watch, and end it."""
        self.send_to_streams(line_of("ERROR", ApiError(code, reason, "as the test wants it").status))
        self.end_streams()

    def _tell(self, storage: tuple[str, str], change: Change) -> None:
        for stream in self.streams:
            stream.tell(storage, change)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        faults = self.faults
        try:
            if faults.hangs:
                await asyncio.Event().wait()
            if faults.slow:
                await asyncio.sleep(faults.slow)
            if faults.refusals:
                refusal = faults.refusals.popleft()
                if refusal.body is not None:
                    return web.Response(status=refusal.code, text=refusal.body)
                raise ApiError(refusal.code, refusal.reason, "refused by the test", refusal.retry_after)  # noqa: TRY301
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            if faults.tokens is not None and token not in faults.tokens:
                raise ApiError(401, "Unauthorized", "Unauthorized")  # noqa: TRY301
            return await self._route(request)
        except ApiError as error:
            headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
            return web.json_response(error.status, status=error.code, headers=headers)
        except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            return web.json_response(ApiError(400, "BadRequest", repr(error)).status, status=400)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        match request.path.strip("/").split("/"):
            case ["version"]:
                return web.json_response({"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
            case ["api"]:
                return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
            case ["apis"]:
                return web.json_response(discovery.groups(self.storage.resources.values()))
            case ["api", version]:
                return web.json_response(discovery.version("", version, self.storage.resources.values()))
            case ["apis", group]:
                return web.json_response(discovery.group(group, self.storage.resources.values()))
            case ["apis", group, version]:
                return web.json_response(discovery.version(group, version, self.storage.resources.values()))
            case ["api", version, *rest]:
                return await self._object(request, "", version, rest)
            case ["apis", group, version, *rest]:
                return await self._object(request, group, version, rest)
        raise not_served()

    async def _object(self, request: web.Request, group: str, version: str, rest: list[str]) -> web.StreamResponse:
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            _, namespace, *rest = rest
        plural, name, subresource = (*rest, "", "")[:3]
        resource = self.storage.resources.get((group, version, plural))
        if resource is None or subresource not in {"", "status"} or (namespace and not resource.namespaced):
            raise not_served()
        verb = _verb(request, name)
        self.requests[verb, plural] += 1
        if (verb, plural) in self.faults.forbidden:
            raise ApiError(403, "Forbidden", f'{plural} is forbidden: User "me" cannot {verb} resource "{plural}"')
        storage = self.storage
        match verb:
            case "list":
                return self._list(request, resource, namespace)
            case "watch":
                return await self._watch(request, resource, namespace)
            case "get":
                return web.json_response(storage.get(resource, namespace, name))
            case "delete":
                storage.delete(resource, namespace, name)
                return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        return await self._write(request, resource, namespace, name, verb)

    async def _write(
        self, request: web.Request, resource: Resource, namespace: str, name: str, verb: str
    ) -> web.Response:
        storage, dry = self.storage, request.query.get("dryRun") == "All"
        body = await request.read()
        if verb == "patch":
            content_type = request.headers.get("content-type", "")
            try:
                before: Object = storage.get(resource, namespace, name)
            except ApiError:
                if not content_type.startswith("application/apply-patch"):
                    raise
                before = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name}}
            new = patched(content_type, before, body)
        else:
            new = json.loads(body)
        metadata = new["metadata"]
        if (new.get("apiVersion"), new.get("kind")) != (resource.api_version, resource.kind):
            raise ApiError(400, "BadRequest", f"the object provided is unrecognized: {new.get('kind')}")
        if verb != "create" and metadata.get("name") != name:
            raise ApiError(400, "BadRequest", "the name of the object does not match the name on the URL")
        if resource.namespaced:
            if metadata.get("namespace", namespace) != namespace:
                raise ApiError(400, "BadRequest", "the namespace of the object does not match the one of the request")
            storage.get(self.resource("namespaces"), "", namespace)
        version = metadata.get("resourceVersion", "") if verb == "update" else ""
        must = {"create": "create", "update": "exist"}.get(verb, "")
        written = storage.put(resource, namespace, new, must=must, version=version, dry=dry)
        return web.json_response(written, status=201 if verb == "create" else 200)

    def _list(self, request: web.Request, resource: Resource, namespace: str) -> web.Response:
        query = request.query
        matches = selects(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        limit = int(query.get("limit", "0"))
        page = self.storage.list(resource, namespace, matches, limit, query.get("continue", ""))
        metadata: Object = {"resourceVersion": str(page.revision)}
        if page.more:
            metadata |= {"continue": page.more, "remainingItemCount": page.remaining}
        head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": metadata}
        return web.json_response({**head, "items": page.items})

    async def _watch(self, request: web.Request, resource: Resource, namespace: str) -> web.StreamResponse:
        query = request.query
        matches = selects(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        stream = Stream(resource, namespace, matches)
        version = query.get("resourceVersion", "")
        try:
            if version in {"", "0"}:
                frames = [("ADDED", found) for found in self.storage.list(resource, namespace, matches).items]
            else:
                frames = list(self.storage.since(resource, namespace, matches, int(version)))
        except ApiError as error:
            if error.code != 410 or self.faults.expired_as_status:
                raise
            stream.send(line_of("ERROR", error.status))
            stream.send(None)
            frames = []
        for frame in frames:
            stream.send(frame_line(*frame, resource))
        stream.transport = request.transport
        if self.faults.mute:
            stream.mute()
        seconds = min(float(query.get("timeoutSeconds", "1800")), self._watch_seconds)
        bookmarks = query.get("allowWatchBookmarks") == "true"
        response = web.StreamResponse(headers={"content-type": "application/json"})
        self.streams.add(stream)  # before anything is awaited, so that no change is missed
        try:
            with suppress(ConnectionError):
                await response.prepare(request)
                await self._pump(stream, response, asyncio.get_running_loop().time() + seconds, bookmarks)
        finally:
            self.streams.discard(stream)
        return response

    async def _pump(self, stream: Stream, response: web.StreamResponse, until: float, bookmarks: bool) -> None:
        now = asyncio.get_running_loop().time
        bookmark_at = now() + self._bookmark_seconds
        while now() < until:
            while stream.frames and not stream.muted:
                if self.faults.slow:
                    await asyncio.sleep(self.faults.slow)
                line = stream.frames.popleft() if stream.frames else b""
                if line is None:
                    return
                await response.write(line)
            stream.wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(until, bookmark_at)):
                    await stream.wake.wait()
            if now() >= bookmark_at:
                bookmark_at = now() + self._bookmark_seconds
                if bookmarks and self.faults.bookmarks and not stream.frames:
                    stream.send(bookmark_line(stream.resource, self.storage.revision))


def _verb(request: web.Request, name: str) -> str:
    if request.method == "GET":
        return "get" if name else "watch" if request.query.get("watch") in {"true", "1"} else "list"
    verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(request.method)
    if verb is None or (verb == "create") == bool(name):
        raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
    return verb
