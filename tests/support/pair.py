"""Two pickers that share their picks through Redis, each behind an Envoy of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from picker.app.envoy import EnvoyProcess, Template, bootstrap
from tests.support.picker_process import PickerProcess, until


@dataclass
class Pair:
    pickers: list[PickerProcess]
    envoys: list[EnvoyProcess]

    async def met(self) -> None:
        """Wait until each hears the other, and every Envoy asks its picker."""
        for picker in self.pickers:
            await peers(picker, 1)
        await healthy(self.pickers, self.envoys)


async def start_pair(
    start_picker: Any, start_envoy: Any, redis: Any, config: dict[str, Any], template: Template
) -> Pair:
    """Start both with this configuration, before the endpoints that it names."""
    sharing = {
        "enabled": True,
        "redis": {"address": f"127.0.0.1:{redis.port}"},
        "channel": f"picks-{random.random()}",
    }
    addresses = [entry["address"] for entry in config["endpoints"]["static"]]
    pickers, envoys = [], []
    for _ in range(2):
        picker = await start_picker({**config, "sharing": sharing})
        envoys.append(await start_envoy(bootstrap(template, picker=picker.address, endpoints=addresses)))
        pickers.append(picker)
    return Pair(pickers, envoys)


async def peers(picker: PickerProcess, count: int) -> None:
    """Wait until a picker hears so many others."""

    async def found() -> bool:
        return (await picker.metrics())("sharing_peers") == count

    await until(found)


async def healthy(pickers: list[PickerProcess], envoys: list[EnvoyProcess]) -> None:
    """Wait until every Envoy asks its picker: one that starts is not ready before it knows what the other knows."""

    async def all_are() -> bool:
        # An Envoy may not have noticed yet that its picker was away.
        for picker in pickers:
            if (await picker.get("/health"))["status"] != "ok":
                return False
        stats = [await envoy.stats("cluster.picker.membership_healthy") for envoy in envoys]
        return all(one["cluster.picker.membership_healthy"] == 1 for one in stats)

    await until(all_are)
