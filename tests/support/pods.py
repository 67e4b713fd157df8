"""Pods as the kubelet reports them."""

from __future__ import annotations

from typing import Any


def pod(
    name: str,
    ip: str,
    *,
    namespace: str = "default",
    labels: dict[str, str] | None = None,
    ready: bool = True,
    port: int = 8000,
    started: str = "2026-08-14T10:00:00Z",
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A pod that runs."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app": "model"} if labels is None else labels,
            "annotations": annotations or {},
        },
        "spec": {"containers": [{"name": "engine", "image": "engine", "ports": [{"containerPort": port}]}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": started}}}],
        },
    }


def pool(
    name: str, *, namespace: str = "default", labels: dict[str, str] | None = None, ports: tuple[int, ...] = (8000,)
) -> dict[str, Any]:
    """An InferencePool of version 1."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": "model"} if labels is None else labels},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        },
    }
