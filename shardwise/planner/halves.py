"""Backward passes in two halves (``zero_bubble``): what the second one takes, and what is kept for it.

Gradients of linear layers' weights can wait; those of expert stacks, norms, embeddings and the head come in the first
half (:mod:`shardwise.parallel.deferred`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.planner.compute import product_seconds, rank_tokens
from shardwise.planner.layout import Layout, Work
from shardwise.planner.parts import Placed
from shardwise.spec.block import PartCosts, Product
from shardwise.spec.cluster import ClusterSpec


def waiting_products(part: PartCosts) -> list[Product]:
    """Those whose weights' gradients can wait."""
    if part.name == "head":
        return []
    return [one for one in part.products if one.trainable and one.copies == 1]


def waiting_seconds(part: PartCosts, layout: Layout, work: Work, cluster: ClusterSpec) -> Any:
    """Seconds of a part's second half for one micro-batch on one rank; they are part of its backward pass."""
    seconds: Any = 0.0
    rate = cluster.chip.memory_bandwidth * cluster.chip.bandwidth_efficiency
    for one in waiting_products(part):
        alone = product_seconds(replace(one, input_gradient=False), layout, work, cluster, backward=True)
        weights = one.inner * one.outer / (1 if one.split == "none" else layout.tp)
        seconds = (
            seconds + alone * cluster.stack.slowdown * work.host.product + weights * work.accumulation_bytes / rate
        )
    return seconds * part.passes


def deferred_seconds(part: PartCosts, work: Work, cluster: ClusterSpec) -> float:
    """Seconds of the host to put gradients off and take them up again, for one micro-batch."""
    return len(waiting_products(part)) * part.passes * work.host.deferred * cluster.chip.kernel_seconds


def waiting_bytes(part: PartCosts, layout: Layout, work: Work) -> Any:
    """Bytes from a part's first half to its second, for one micro-batch on one rank: inputs, gradients of results.

    Neighbouring products of one width read one input (queries, keys and values; the two of a gated MLP).
    """
    elements: Any = 0.0
    before: Product | None = None
    for one in waiting_products(part):
        inner = one.inner / (layout.tp if one.split == "inner" else 1)
        outer = one.outer / (layout.tp if one.split == "outer" else 1)
        spread = layout.tp if one.split == "none" and layout.sequence_parallel else 1
        shared = before is not None and (before.inner, before.split) == (one.inner, one.split)
        elements = elements + one.uses * (outer + (0 if shared else inner)) / spread
        before = one
    return elements * rank_tokens(layout, work) * work.compute_bytes * part.passes


def stage_waiting_seconds(parts: Sequence[Placed], layout: Layout, work: Work, cluster: ClusterSpec) -> float:
    """:func:`waiting_seconds` of all parts of a stage."""
    return float(sum(times * waiting_seconds(part, layout, work, cluster) for part, times, _ in parts))


def stage_waiting_bytes(parts: Sequence[Placed], layout: Layout, work: Work) -> float:
    """:func:`waiting_bytes` of all parts of a stage."""
    return float(sum(times * waiting_bytes(part, layout, work) for part, times, _ in parts))
