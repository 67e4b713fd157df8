"""Which metrics an engine shows: the ones that routers read, as vLLM and SGLang name them."""

from __future__ import annotations

from collections.abc import Sequence

from picker.sim.config import EngineSimConfig
from picker.sim.driver import Driver
from picker.sim.metrics import Exposition


def exposition(config: EngineSimConfig, drivers: Sequence[Driver], now: float) -> bytes:
    """Return the text of /metrics, with the driver of every data-parallel rank; `now` is the Unix time."""
    out = Exposition(f"{config.flavour}:")
    for rank, driver in enumerate(drivers):
        if config.flavour == "sglang":
            _sglang(out, config, driver, rank)
        else:
            _vllm(out, config, driver, rank, now)
    return out.render()


def _vllm(out: Exposition, config: EngineSimConfig, driver: Driver, rank: int, now: float) -> None:
    engine, cache, counts = driver.engine, driver.engine.cache, driver.counts
    out.labels = {"engine": str(rank), "model_name": config.model}
    out.gauge("num_requests_running", engine.running)
    out.gauge("num_requests_waiting", engine.waiting)
    out.gauge("kv_cache_usage_perc", cache.used / cache.usable)
    out.counter("prefix_cache_queries", engine.prefix_queries)
    out.counter("prefix_cache_hits", engine.prefix_hits)
    out.counter("num_preemptions", engine.preemptions)
    out.counter("prompt_tokens", counts["prompt_tokens"])
    out.counter("generation_tokens", counts["generated_tokens"])
    out.histogram("time_to_first_token_seconds", driver.time_to_first_token)
    out.histogram("inter_token_latency_seconds", driver.inter_token)
    out.gauge(
        "cache_config_info",
        1,
        block_size=str(config.limits.block_size),
        num_gpu_blocks=str(config.limits.num_gpu_blocks),
        enable_prefix_caching="True",
    )
    if config.loras:
        running, waiting = engine.adapters()
        out.gauge(
            "lora_requests_info",
            now,
            max_lora=str(len(config.loras)),
            running_lora_adapters=",".join(sorted(running)),
            waiting_lora_adapters=",".join(sorted(waiting)),
        )


def _sglang(out: Exposition, config: EngineSimConfig, driver: Driver, rank: int) -> None:
    engine, cache, counts = driver.engine, driver.engine.cache, driver.counts
    size = config.limits.block_size
    dp_rank = {"dp_rank": str(rank)} if config.data_parallel_size > 1 else {}
    out.labels = {"model_name": config.model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", **dp_rank}
    out.gauge("num_running_reqs", engine.running)
    out.gauge("num_queue_reqs", engine.waiting)
    out.gauge("token_usage", cache.used / cache.usable)
    out.gauge("num_used_tokens", cache.used * size)
    out.gauge("max_total_num_tokens", cache.usable * size)
    out.gauge("page_size", size)
    out.gauge("cache_hit_rate", engine.prefix_hits / engine.prefix_queries if engine.prefix_queries else 0.0)
    out.counter("cached_tokens", engine.prefix_hits)
    out.counter("prompt_tokens", counts["prompt_tokens"])
    out.counter("generation_tokens", counts["generated_tokens"])
    out.histogram("time_to_first_token_seconds", driver.time_to_first_token)
    out.histogram("inter_token_latency_seconds", driver.inter_token)
