"""A cluster as the public conformance suite sets it up: pools of three pods each, and a picker for each pool."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest_asyncio

from tests.conformance.servers import Pod, h2c_backend
from tests.e2e.conftest import envoys, pickers, start_envoy_here, start_picker
from tests.support.fake_kubernetes.server import FakeKubernetes
from tests.support.picker_process import PickerProcess, until
from tests.support.pods import pod, pool

__all__ = ["envoys", "pickers", "start_envoy_here", "start_picker"]

NAMESPACE = "default"


@dataclass
class InferencePool:
    """A pool, its pods, and the ports that they serve on. `configuration` is for a picker of it."""

    name: str
    pods: list[Pod] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    configuration: dict = field(default_factory=dict)

    @property
    def addresses(self) -> list[str]:
        """All endpoints."""
        return [f"{pod.ip}:{port}" for pod in self.pods for port in self.ports]

    @property
    def full_name(self) -> str:
        return f"{NAMESPACE}/{self.name}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster():
    server = FakeKubernetes()
    await server.start()
    yield server
    await server.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def make_pool(cluster, tmp_path_factory):
    """Makes an InferencePool of so many pods, which serve on so many ports each."""
    kubeconfig = tmp_path_factory.mktemp("conformance") / "kubeconfig"
    kubeconfig.write_text(cluster.kubeconfig())
    started = []

    async def make(name, *, pods=3, ports=1, serve=True):
        made = InferencePool(name, [Pod(f"{name}-{number}") for number in range(pods)], [0] * ports)
        for each in made.pods:
            made.ports = await each.start(made.ports)
            started.append(each)
            if not serve:
                await each.stop()
            cluster.apply(pod(each.name, each.ip, labels={"app": name}, port=made.ports[0]))
        cluster.apply(pool(name, labels={"app": name}, ports=tuple(made.ports) if pods else (8000,)))
        source = {"pool": {"name": name}, "namespace": NAMESPACE, "kubeconfig": str(kubeconfig)}
        made.configuration = {
            "endpoints": {"kubernetes": source},
            "exchange": {"conformance": True},
            "scrape": {"intervalSeconds": 1, "staleSeconds": 10},
        }
        return made

    yield make
    for each in started:
        await each.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def primary(make_pool):
    return await make_pool("primary-inference-pool")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def secondary(make_pool):
    return await make_pool("secondary-inference-pool")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def data_parallel(make_pool):
    return await make_pool("dp-inference-pool", ports=3)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def h2c(make_pool, envoys):
    """A pool of servers that speak HTTP/2 and refuse anything else."""
    made = await make_pool("h2c-inference-pool", serve=False)
    await envoys(h2c_backend(made.addresses))
    return made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def deserted(make_pool):
    """A pool without pods."""
    return await make_pool("deserted-inference-pool", pods=0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def picker_of(pickers):
    """Starts the picker of a pool, once."""

    async def start(found: InferencePool) -> PickerProcess:
        picker = await pickers(found.configuration)

        async def all_known():
            return (await picker.metrics())("endpoints") == len(found.addresses)

        await until(all_known)
        return picker

    return start
