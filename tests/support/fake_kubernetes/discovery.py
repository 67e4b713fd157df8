"""What clients ask first: which groups, versions and resources there are."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.fake_kubernetes.resources import Resource
from tests.support.fake_kubernetes.selectors import Object
from tests.support.fake_kubernetes.storage import not_served

_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def groups(resources: Iterable[Resource]) -> Object:
    """The document at `/apis`."""
    known = list(resources)
    names = dict.fromkeys(one.group for one in known if one.group)
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group(name, known) for name in names]}


def group(name: str, resources: Iterable[Resource]) -> Object:
    """The document at `/apis/GROUP`. Raises ApiError."""
    versions = dict.fromkeys(one.version for one in resources if one.group == name)
    if not versions:
        raise not_served()
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": listed, "preferredVersion": listed[0]}


def version(name: str, number: str, resources: Iterable[Resource]) -> Object:
    """The document at `/apis/GROUP/VERSION`, or at `/api/v1` for the group without a name. Raises ApiError."""
    found = [
        {"name": one.plural, "singularName": one.kind.lower(), "namespaced": one.namespaced, "kind": one.kind}
        for one in resources
        if (one.group, one.version) == (name, number)
    ]
    if not found:
        raise not_served()
    head = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{name}/{number}".strip("/")}
    return {**head, "resources": [{**one, "verbs": _VERBS} for one in found]}
