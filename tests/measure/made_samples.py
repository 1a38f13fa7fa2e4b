"""Samples of a machine whose numbers are known: what the fits are to find again."""

from __future__ import annotations

import math

from shardwise.measure.samples import (
    AttentionSample,
    CollectiveSample,
    ElementwiseSample,
    ProductSample,
    Samples,
)

RATE, HALF, BANDWIDTH, OPERATOR, LATENCY, WIRE = 4e10, 40.0, 8e9, 5e-6, 2e-4, 1.5e9
SEND = WIRE / 4  # slower than collectives, which it must not slow down in the planner
SCATTER = 2.5  # times as long as a gather
ATTENTION = 0.4
SHAPES = ((64, 64, 64), (128, 128, 128), (512, 256, 512), (512, 512, 2048), (1024, 1024, 1024))
SIZES = (2**12, 2**17, 2**20, 2**24)


def product(rows: int, inner: int, outer: int, precision: str = "fp32", rate: float = RATE) -> ProductSample:
    speed = rate * math.prod(side / (side + HALF) for side in (rows, inner, outer))
    return ProductSample(precision, rows, inner, outer, 2.0 * rows * inner * outer / speed)


def attention(length: int, head_dim: int, peak: float) -> AttentionSample:
    seen = length / 2
    speed = head_dim / (head_dim + 96) * (128 + 96) / 128 * seen / (seen + 256)
    flops = 2.0 * 2 * length * 4 * seen * 2 * head_dim
    return AttentionSample("fused", 2, 4, length, head_dim, flops * (1 + 2.5 / 0.85) / (ATTENTION * peak * speed))


def collective(op: str, ranks: int, num_bytes: int) -> CollectiveSample:
    if op == "send":
        return CollectiveSample(op, ranks, num_bytes, LATENCY / 2 + num_bytes / SEND)
    times = {"all_reduce": 2, "reduce_scatter": SCATTER}.get(op, 1)
    seconds = times * (LATENCY * (ranks - 1) + num_bytes * (ranks - 1) / ranks / WIRE)
    return CollectiveSample(op, ranks, num_bytes, seconds)


def made_samples(processes: int = 4, cores: int = 2) -> Samples:
    products = [product(*shape) for shape in SHAPES] + [product(*SHAPES[-1], "bf16", 2 * RATE)]
    peak = max(2.0 * p.rows * p.inner * p.outer / p.seconds for p in products[:-1])
    ops = ("all_reduce", "all_gather", "reduce_scatter", "send") if processes > 1 else ()
    groups = [size for size in range(2, processes + 1) if processes % size == 0]
    moved = [(2.0**20, 1.0), (2.0**22, 1.0), (2.0**24, 0.8)]
    return Samples(
        device_type="cpu",
        processes=processes,
        threads=1,
        cores=cores,
        level="quick",
        memory_bytes=2.0**32,
        operator_seconds=OPERATOR,
        products=tuple(products),
        attention=tuple(attention(length, 64, max(peak, RATE)) for length in (128, 256, 512)),
        elementwise=tuple(ElementwiseSample("add", size, size / (BANDWIDTH * s) + OPERATOR) for size, s in moved),
        collectives=tuple(collective(op, ranks, size) for op in ops for ranks in groups for size in SIZES),
    )
