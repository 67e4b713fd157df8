"""`picker engine-sim`: serve one simulated engine from the command line."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import fields
from typing import get_args

import msgspec
import uvloop

from picker.sim.config import EngineSimConfig, Flavour
from picker.sim.event_wire import FORMATS
from picker.sim.faults import MODES, Fault
from picker.sim.launch import start_engine
from picker.sim.limits import EngineLimits, StepCost
from picker.sim.publisher import KvEventSettings

_COST_HELP = {
    "base": "seconds of any step",
    "per_prefill_token": "seconds per prompt token without context",
    "context_scale": "tokens of context that double the cost of a prompt token",
    "per_decode": "seconds per generated token",
    "per_context_token": "seconds per token of context read while decoding",
    "speed": "divides all of these: 10 is ten times as fast",
}
_LIMITS_HELP = {
    "block_size": "tokens per KV block",
    "num_gpu_blocks": "KV blocks, the unusable null block included",
    "max_num_batched_tokens": "tokens computed per step",
    "max_num_seqs": "requests that run at once",
    "watermark": "share of the blocks that stays free when a request is admitted",
    "max_model_len": "tokens of prompt and answer together",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to `parser`."""
    defaults = EngineSimConfig()
    parser.add_argument("--host", default=defaults.host, help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (%(default)s)")
    parser.add_argument("--name", default=defaults.name, help="sent as x-engine with every response (%(default)s)")
    parser.add_argument("--model", default=defaults.model, help="served model name (%(default)s)")
    parser.add_argument("--lora", default="", metavar="A,B", help="names of LoRA adapters, separated by commas")
    parser.add_argument("--any-model", action="store_true", help="serve any model name instead of answering 404")
    parser.add_argument(
        "--engine", choices=get_args(Flavour), default=defaults.flavour, help="whose metric names to use (%(default)s)"
    )
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=defaults.data_parallel_size,
        help="engines behind the port, each with its own cache; X-data-parallel-rank names one (%(default)s)",
    )
    events = KvEventSettings()
    parser.add_argument("--kv-events-port", type=int, metavar="PORT", help="publish KV events here, rank r at PORT + r")
    parser.add_argument("--kv-events-replay-port", type=int, metavar="PORT", help="replay them here, in the same way")
    parser.add_argument("--kv-events-topic", default=events.topic, help="topic of KV events (%(default)s)")
    parser.add_argument(
        "--kv-events-format", choices=FORMATS, default=events.form, help="as vLLM 0.32 or 0.20 (%(default)s)"
    )
    parser.add_argument(
        "--kv-events-buffer-steps", type=int, default=events.buffer_steps, help="batches to replay (%(default)s)"
    )
    parser.add_argument("--max-waiting", type=int, default=defaults.max_waiting, help="queue length (%(default)s)")
    parser.add_argument("--grace", type=float, default=defaults.grace, help="seconds to finish in (%(default)s)")
    for group, help_of in ((defaults.limits, _LIMITS_HELP), (defaults.cost, _COST_HELP)):
        for field in fields(group):
            default = getattr(group, field.name)
            parser.add_argument(
                _option(field.name), type=type(default), default=default, help=f"{help_of[field.name]} (%(default)s)"
            )
    parser.add_argument("--fault", choices=MODES, default="none", help="what goes wrong from the start (%(default)s)")
    for name in ("status", "factor", "share", "after_chunks"):
        default = getattr(defaults.fault, name)
        parser.add_argument(f"--fault-{name.replace('_', '-')}", type=type(default), default=default)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status: 2 for settings that make no sense or a port in use."""
    return uvloop.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        config = _config(args)
        engine = await start_engine(config)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"engine-sim: {error}\n")
        return 2
    sys.stdout.write(f"engine-sim {config.name} listening on {engine.url}\n")
    sys.stdout.flush()
    stopped, failed = asyncio.create_task(stop.wait()), asyncio.ensure_future(engine.failed())
    await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    await engine.close()
    if not stopped.done():
        await failed  # raises why
    return 0


def _config(args: argparse.Namespace) -> EngineSimConfig:
    faults = {
        "mode": args.fault,
        "status": args.fault_status,
        "factor": args.fault_factor,
        "share": args.fault_share,
        "after_chunks": args.fault_after_chunks,
    }
    try:
        fault = msgspec.convert(faults, Fault)
    except msgspec.ValidationError as error:
        raise ValueError(f"the --fault options: {error}") from None
    if args.kv_events_port is None and args.kv_events_replay_port is not None:
        raise ValueError("--kv-events-replay-port is given alone: give --kv-events-port too")
    return EngineSimConfig(
        name=args.name,
        model=args.model,
        loras=tuple(name for name in args.lora.split(",") if name),
        any_model=args.any_model,
        host=args.host,
        port=args.port,
        flavour=args.engine,
        limits=EngineLimits(**{field.name: getattr(args, field.name) for field in fields(EngineLimits)}),
        cost=StepCost(**{field.name: getattr(args, field.name) for field in fields(StepCost)}),
        data_parallel_size=args.data_parallel_size,
        kv_events=None
        if args.kv_events_port is None
        else KvEventSettings(
            args.kv_events_port,
            args.kv_events_replay_port,
            args.kv_events_topic,
            args.kv_events_format,
            args.kv_events_buffer_steps,
        ),
        max_waiting=args.max_waiting,
        fault=fault,
        grace=args.grace,
    )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
