"""What a PATCH makes of an object, by its content type."""

from __future__ import annotations

import json
from typing import Any

import yaml

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "conditions": "type",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists that a strategic merge patch merges by a key; `ports` have `port` in a Service, `containerPort` in a Pod."""


def patched(content_type: str, target: Any, body: bytes) -> Any:
    """Raises ValueError for a body or a content type that cannot be."""
    match content_type.partition(";")[0]:
        case "application/merge-patch+json":
            return merge(target, json.loads(body))
        case "application/strategic-merge-patch+json":
            return strategic_merge(target, json.loads(body))
        case "application/apply-patch+yaml":
            return strategic_merge(target, yaml.safe_load(body))
        case "application/json-patch+json":
            return _json_patch(target, json.loads(body))
    raise ValueError(f"content type {content_type!r} is not supported")


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic_merge(target: Any, patch: Any) -> Any:
    """As `merge`, but lists of named things are merged by their names; `$` keys order, delete or replace."""
    if not isinstance(patch, dict):
        return patch
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list) and (name := _list_key(key, value)):
            result[key] = _merge_list(result.get(key) or [], value, name)
        else:
            result[key] = strategic_merge(result.get(key), value)
    return result


def _list_key(field: str, items: list[Any]) -> str | None:
    if field == "ports":
        return next((name for name in ("containerPort", "port") if any(name in item for item in items)), None)
    return _KEYS.get(field)


def _merge_list(old: list[Any], new: list[Any], name: str) -> list[Any]:
    merged = {item.get(name): item for item in old}
    for item in new:
        if item.get("$patch") == "delete":
            merged.pop(item.get(name), None)
        else:
            merged[item.get(name)] = strategic_merge(merged.get(item.get(name)), item)
    return list(merged.values())


def _json_patch(target: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902, for members of objects."""
    result = json.loads(json.dumps(target))
    for operation in operations:
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        holder = result
        for part in way:
            holder = holder[part]
        if operation["op"] == "remove":
            del holder[last]
        elif operation["op"] in {"add", "replace"}:
            holder[last] = operation["value"]
        else:
            raise ValueError(f"op {operation['op']!r} is not supported")
    return result
