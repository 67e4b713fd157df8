from __future__ import annotations

import pytest

from picker.core.kubernetes.pools import Selection
from picker.core.kubernetes.watch import WatchSettings
from picker.io.discovery.kubernetes import KubernetesDiscovery, KubernetesSettings
from picker.io.discovery.kubernetes_api import ApiSettings
from tests.support.fake_kubernetes.server import FakeKubernetes

PODS = Selection("app=model", (8000,))
QUICK = WatchSettings(shortest_pause=0.01, longest_pause=0.05, longest_wait=0.2)


@pytest.fixture
async def cluster():
    server = FakeKubernetes(bookmark_seconds=0.05)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def discover(cluster, tmp_path, background):
    """Starts discovery over the fake cluster; what it tells is in `told`, the addresses of now in `addresses`."""

    class Discovery(KubernetesDiscovery):
        def __init__(self, settings):
            super().__init__(settings)
            self.told = []

        @property
        def addresses(self):
            return None if not self.told else [endpoint.address for endpoint in self.told[-1]]

    def start(source=PODS, silence=0.5, user=None, watch=QUICK, **more):
        path = tmp_path / "kubeconfig"
        path.write_text(cluster.kubeconfig(**(user or {})))
        api = ApiSettings(request=more.pop("request", 0.5), silence=silence)
        settings = KubernetesSettings(source=source, kubeconfig=str(path), watch=watch, api=api, **more)
        discovery = Discovery(settings)
        background(discovery.run(discovery.told.append))
        return discovery

    return start
