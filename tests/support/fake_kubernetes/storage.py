"""Objects with revisions and history: what etcd and the watch cache are to an API server. No I/O.

Every write has the next revision, which becomes the object's `resourceVersion`. A watcher sees an object through its
selectors: one that begins to match is ADDED, one that ceases to is DELETED. History before `compacted` is gone.
"""

from __future__ import annotations

import copy
import itertools
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from tests.support.fake_kubernetes.resources import Resource, defined_by
from tests.support.fake_kubernetes.selectors import Matches, Object

_SNAPSHOTS = 100


class ApiError(Exception):
    """An answer other than the wanted one, as a `Status`."""

    def __init__(self, code: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after = retry_after

    @property
    def status(self) -> Object:
        details = {} if self.retry_after is None else {"details": {"retryAfterSeconds": self.retry_after}}
        head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**head, "message": str(self), "reason": self.reason, "code": self.code, **details}


class Change(NamedTuple):
    """A write: the object before and after it; None where there was or is none."""

    revision: int
    before: Object | None
    after: Object | None

    def seen_through(self, matches: Matches) -> tuple[str, Object] | None:
        """The type and object of the frame for a watcher; None when it sees nothing of it."""
        had = self.before is not None and matches(self.before)
        has = self.after is not None and matches(self.after)
        if has:
            assert self.after is not None
            return ("MODIFIED" if had else "ADDED"), self.after
        if had:
            last = copy.copy(self.before if self.after is None else self.after)
            assert last is not None
            last["metadata"] = {**last["metadata"], "resourceVersion": str(self.revision)}
            return "DELETED", last
        return None


class Page(NamedTuple):
    """A page of a list at a revision, and the token of the next one."""

    revision: int
    items: list[Object]
    more: str
    remaining: int


class Storage:
    """All objects. Those that it hands out must not be changed."""

    def __init__(self, resources: list[Resource]) -> None:
        self.revision = 1000
        self.compacted = 0
        self.resources = {(one.group, one.version, one.plural): one for one in resources}
        self.on_change: list[Callable[[tuple[str, str], Change], None]] = []
        self._objects: dict[tuple[str, str], dict[tuple[str, str], Object]] = {}
        self._history: dict[tuple[str, str], list[Change]] = {}
        self._snapshots: OrderedDict[str, tuple[int, list[Object]]] = OrderedDict()
        self._tokens = itertools.count(1)

    def all(self, resource: Resource) -> list[Object]:
        """Every object of a kind, by namespace and name."""
        return [found for _, found in sorted(self._objects.get(resource.storage, {}).items())]

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        found = self._objects.get(resource.storage, {}).get((namespace, name))
        if found is None:
            raise _not_found(resource, name)
        return found

    def put(
        self, resource: Resource, namespace: str, new: Object, *, must: str = "", version: str = "", dry: bool = False
    ) -> Object:
        """Write an object; `must` is `create` or `exist`. Raises ApiError, also when it is not at `version` any more."""
        name = new["metadata"]["name"]
        objects = self._objects.setdefault(resource.storage, {})
        before = objects.get((namespace, name))
        if before is not None and must == "create":
            raise ApiError(409, "AlreadyExists", f'{resource.plural} "{name}" already exists')
        if before is None and must == "exist":
            raise _not_found(resource, name)
        if before is not None and version and version != before["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", f"{resource.plural} {name!r} has been modified; apply your changes to it")
        after = copy.deepcopy(new)
        metadata = after["metadata"]
        old = before["metadata"] if before else {}
        metadata["uid"] = old.get("uid") or str(uuid.uuid4())
        metadata["creationTimestamp"] = old.get("creationTimestamp") or _now()
        if resource.namespaced:
            metadata["namespace"] = namespace
        same = (
            before is not None
            and {**after, "metadata": {**metadata, "resourceVersion": old["resourceVersion"]}} == before
        )
        if same:
            return before
        if not dry:
            self.revision += 1
        metadata["resourceVersion"] = str(self.revision)
        if not dry:
            objects[namespace, name] = after
            self._record(resource, Change(self.revision, before, after))
            if resource.kind == "CustomResourceDefinition":
                for one in defined_by(after):
                    self.resources[one.group, one.version, one.plural] = one
        return after

    def delete(self, resource: Resource, namespace: str, name: str) -> Object:
        """Remove an object at once. Raises ApiError."""
        before = self.get(resource, namespace, name)
        del self._objects[resource.storage][namespace, name]
        self.revision += 1
        self._record(resource, Change(self.revision, before, None))
        return before

    def list(self, resource: Resource, namespace: str, matches: Matches, limit: int = 0, token: str = "") -> Page:
        """Return a page. All pages of a list are of the revision of its first one; ApiError when that was compacted."""
        if token:
            revision, rest = self._snapshots.get(token, (-1, []))
            if revision < self.compacted:
                raise expired("The provided continue parameter is too old")
        else:
            revision = self.revision
            rest = [found for found in self.all(resource) if _within(found, namespace) and matches(found)]
        page, rest = (rest[:limit], rest[limit:]) if limit else (rest, [])
        more = ""
        if rest:
            more = f"page-{next(self._tokens)}"
            self._snapshots[more] = (revision, rest)
            while len(self._snapshots) > _SNAPSHOTS:
                self._snapshots.popitem(last=False)
        return Page(revision, page, more, len(rest))

    def since(
        self, resource: Resource, namespace: str, matches: Matches, revision: int
    ) -> Iterator[tuple[str, Object]]:
        """The frames after a revision. Raises ApiError when its history is gone, or when it lies in the future."""
        if revision < self.compacted:
            raise expired(f"too old resource version: {revision} ({self.compacted})")
        if revision > self.revision:
            raise ApiError(504, "Timeout", f"Too large resource version: {revision}, current: {self.revision}", 1)
        for change in self._history.get(resource.storage, []):
            if change.revision > revision:
                frame = frame_for(change, namespace, matches)
                if frame is not None:
                    yield frame

    def compact(self) -> None:
        """Forget all history, as etcd does every few minutes."""
        self.compacted = self.revision
        self._history.clear()

    def _record(self, resource: Resource, change: Change) -> None:
        self._history.setdefault(resource.storage, []).append(change)
        for tell in self.on_change:
            tell(resource.storage, change)


def frame_for(change: Change, namespace: str, matches: Matches) -> tuple[str, Object] | None:
    """The type and object of the frame of a change, for a watcher of a namespace; None when it sees nothing of it."""
    return change.seen_through(lambda found: _within(found, namespace) and matches(found))


def not_served() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def _within(found: Object, namespace: str) -> bool:
    return not namespace or found["metadata"].get("namespace") == namespace


def _not_found(resource: Resource, name: str) -> ApiError:
    group = f".{resource.group}" if resource.group else ""
    return ApiError(404, "NotFound", f'{resource.plural}{group} "{name}" not found')


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
