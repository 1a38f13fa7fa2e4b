"""``measure(context)``: what one rank of a measurement does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import torch
import torch.distributed as dist

from shardwise.files import replace_text
from shardwise.measure.clock import Clock
from shardwise.measure.comm import time_collectives
from shardwise.measure.compute import time_attention, time_elementwise, time_operator, time_products
from shardwise.measure.names import ANSWER, REQUEST
from shardwise.measure.samples import Samples

_SPANS = {"quick": (0.03, 3), "full": (0.08, 3)}  # seconds of a span, and rounds
Sample = TypeVar("Sample")


class Context(Protocol):
    """What a worker is told of its job; :class:`shardwise.train.context.WorkerContext` has more."""

    @property
    def output_dir(self) -> Path: ...
    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def terminal(self) -> TextIO | None: ...


def measure(context: Context) -> dict[str, Any]:
    """Time all that ``request.json`` asks for; rank 0 leaves it as ``samples.json``."""
    request = json.loads((context.output_dir / REQUEST).read_text(encoding="utf-8"))
    level, device_type = request["level"], request["device_type"]
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, context.local_rank)
    torch.manual_seed(0)
    clock = Clock(device, *_SPANS[level])
    began = time.perf_counter()

    def timed(name: str, samples: Iterable[Sample]) -> tuple[Sample, ...]:
        before = time.perf_counter()
        found = tuple(samples)
        if context.terminal is not None:
            seconds = time.perf_counter() - before
            print(f"measured: {len(found)} {name} in {seconds:.1f} s", file=context.terminal, flush=True)
        return found

    samples = Samples(
        device_type=device_type,
        processes=dist.get_world_size(),
        threads=torch.get_num_threads(),
        cores=request["cores"],
        level=level,
        memory_bytes=_memory_bytes(device, request["memory_bytes"]),
        operator_seconds=time_operator(clock),
        products=timed("matrix products", time_products(clock, level)),
        attention=timed("attention kernels", time_attention(clock, level)),
        elementwise=timed("elementwise operators", time_elementwise(clock, level)),
        collectives=timed("collectives", time_collectives(clock, level)),
    )
    if context.rank == 0:
        answer = samples.to_json() | {"took_seconds": time.perf_counter() - began}
        replace_text(context.output_dir / ANSWER, json.dumps(answer))
    return {}


def _memory_bytes(device: torch.device, host_share: float) -> float:
    if device.type == "cpu":
        return host_share
    return float(torch.get_device_module(device.type).get_device_properties(device).total_memory)
