"""What the configuration says of Kubernetes, as discovery takes it."""

from __future__ import annotations

from picker.app.config_settings import KubernetesSource
from picker.core.kubernetes.pools import Selection
from picker.core.kubernetes.watch import WatchSettings
from picker.io.discovery.endpoint_list import Engine
from picker.io.discovery.kubernetes import KubernetesSettings
from picker.io.discovery.kubernetes_api import ApiSettings


def kubernetes_settings(source: KubernetesSource) -> KubernetesSettings:
    """Return the settings of discovery."""
    return KubernetesSettings(
        source=source.pool.name or Selection(source.selector, source.ports),
        group=source.pool.group,
        namespace=source.namespace,
        kubeconfig=source.kubeconfig,
        context=source.context,
        engine=str(source.engine),
        engines=tuple(str(engine) for engine in Engine),
        watch=WatchSettings(watch=source.watch_seconds, longest_pause=source.longest_retry_seconds),
        api=ApiSettings(request=source.request_seconds, silence=source.silence_seconds),
    )


def pool_name(source: KubernetesSource) -> str:
    """The InferencePool as "namespace/name"; empty when there is none, or its namespace is not in the configuration."""
    return f"{source.namespace}/{source.pool.name}" if source.namespace and source.pool.name else ""
