"""Read the wanted few metrics out of an engine's Prometheus page, without parsing the rest of it.

Engines with data-parallel ranks expose one series for each rank: requests are summed, usage is averaged.
Metric names: vLLM 0.9 to 0.33 and SGLang, as their releases expose them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from picker.core.endpoints import Adapters, EngineMetrics


class MetricNames(Struct, frozen=True):
    """What one engine calls its metrics; of several names the first that is on the page counts."""

    waiting: tuple[bytes, ...]
    running: tuple[bytes, ...]
    kv_usage: tuple[bytes, ...]
    ttft: tuple[bytes, ...]
    tpot: tuple[bytes, ...]


NAMES: Mapping[str, MetricNames] = {
    "vllm": MetricNames(
        waiting=(b"vllm:num_requests_waiting",),
        running=(b"vllm:num_requests_running",),
        kv_usage=(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"),
        ttft=(b"vllm:time_to_first_token_seconds",),
        tpot=(b"vllm:inter_token_latency_seconds", b"vllm:time_per_output_token_seconds"),
    ),
    "sglang": MetricNames(
        waiting=(b"sglang:num_queue_reqs",),
        running=(b"sglang:num_running_reqs",),
        kv_usage=(b"sglang:token_usage",),
        ttft=(b"sglang:time_to_first_token_seconds",),
        tpot=(b"sglang:inter_token_latency_seconds", b"sglang:time_per_output_token_seconds"),
    ),
}

_STARTED = (b"process_start_time_seconds",)
_ADAPTERS = b"\nvllm:lora_requests_info{"
_LABEL = re.compile(rb'([a-z_]+)="([^"]*)"')
_CACHE_CONFIG = b"\nvllm:cache_config_info{"
_CACHE_TOKENS = re.compile(rb'[{,]kv_cache_size_tokens="([0-9]{1,12})"')
_BLOCK_SIZE = re.compile(rb'[{,]block_size="([0-9]{1,9})"')
_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="([0-9]{1,9})"')


class PageReader:
    """Reads successive pages of one engine, since means need the page before."""

    def __init__(self, engine: str) -> None:
        self._names = NAMES[engine]
        self._ttft = _Mean()
        self._tpot = _Mean()
        self._started: float | None = None

    def read(self, page: bytes) -> tuple[EngineMetrics, bool]:
        """Returns the metrics, and whether the engine has restarted since the page before.

        A restart shows in the process start time where the engine exposes it, else in counters that fell.
        """
        names = self._names
        page = b"\n" + page
        usage = _values(page, names.kv_usage)
        fell = self._ttft.update(page, names.ttft) | self._tpot.update(page, names.tpot)
        started = max(_values(page, _STARTED), default=None)
        restarted = fell or (started is not None and self._started is not None and started > self._started)
        self._started = started
        metrics = EngineMetrics(
            waiting=_sum(page, names.waiting),
            running=_sum(page, names.running),
            kv_usage=sum(usage) / len(usage) if usage else None,
            ttft=self._ttft.mean,
            tpot=self._tpot.mean,
            started_at=started,
            cache_tokens=_cache_tokens(page),
            adapters=_adapters(page),
        )
        return metrics, restarted


class _Mean:
    """Mean of a histogram since the page before; the last known one while nothing happens."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self._sum = 0.0
        self._count = 0.0

    def update(self, page: bytes, names: tuple[bytes, ...]) -> bool:
        """Take the page in; true when the counters fell, so that the engine must have restarted."""
        total = _sum(page, tuple(name + b"_sum" for name in names))
        count = _sum(page, tuple(name + b"_count" for name in names))
        if total is None or count is None:
            self.mean = None
            return False
        fell = count < self._count
        if fell:
            self._sum = self._count = 0.0
        if count > self._count:
            self.mean = max(0.0, total - self._sum) / (count - self._count)
        elif self.mean is None:
            self.mean = 0.0
        self._sum, self._count = total, count
        return fell


def _adapters(page: bytes) -> Adapters | None:
    """What the latest of vLLM's series on adapters says: a change of them makes a new one, with its time as the value."""
    found: Adapters | None = None
    latest = -1.0
    start = 0
    while (start := page.find(_ADAPTERS, start)) >= 0:
        end = page.find(b"\n", start + 1)
        labels, _, value = page[start : end if end >= 0 else len(page)].rpartition(b"} ")
        start += len(_ADAPTERS)
        try:
            time = float(value.split()[0])
        except (ValueError, IndexError):
            continue
        if time > latest:
            latest = time
            said = dict(_LABEL.findall(labels))
            most = said.get(b"max_lora", b"")
            found = Adapters(
                _listed(said.get(b"running_lora_adapters", b"")),
                _listed(said.get(b"waiting_lora_adapters", b"")),
                int(most) if most.isdigit() and len(most) < 7 else 0,
            )
    return found


def _listed(names: bytes) -> frozenset[str]:
    return frozenset(name.strip().decode("utf-8", "replace") for name in names[:65_536].split(b",") if name.strip())


def _cache_tokens(page: bytes) -> float | None:
    """Tokens that an engine's KV caches have room for: vLLM gives blocks and their size as labels, SGLang the tokens."""
    tokens = 0.0
    start = 0
    while (start := page.find(_CACHE_CONFIG, start)) >= 0:
        end = page.find(b"\n", start + 1)
        line = page[start : end if end >= 0 else len(page)]
        size, blocks = _BLOCK_SIZE.search(line), _BLOCKS.search(line)
        if said := _CACHE_TOKENS.search(line):
            tokens += int(said[1])
        elif size and blocks:
            tokens += int(size[1]) * int(blocks[1])
        start += len(_CACHE_CONFIG)
    return tokens or _sum(page, (b"sglang:max_total_num_tokens",))


def _sum(page: bytes, names: tuple[bytes, ...]) -> float | None:
    values = _values(page, names)
    return sum(values) if values else None


def _values(page: bytes, names: tuple[bytes, ...]) -> list[float]:
    for name in names:
        values = list(_series(page, name))
        if values:
            return values
    return []


def _series(page: bytes, name: bytes) -> Iterator[float]:
    """The values of every series of `name` that are finite and not negative."""
    start = 0
    while (start := page.find(b"\n" + name, start)) >= 0:
        start += 1 + len(name)
        end = page.find(b"\n", start)
        line = page[start : end if end >= 0 else len(page)].partition(b" # ")[0]
        if line[:1] in (b"{", b" "):
            try:
                value = float(line.rpartition(b"}")[2].split()[0])
            except (ValueError, IndexError):
                continue
            if 0 <= value < float("inf"):
                yield value
