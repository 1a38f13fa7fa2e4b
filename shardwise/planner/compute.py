"""Time of one part of a model for one micro-batch, forward and backward, by named terms.

Numbers of a layout may be numpy arrays of candidates; the terms then are arrays too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.planner.arrays import largest, smallest
from shardwise.planner.collectives import collective_seconds
from shardwise.planner.layout import Layout, Work
from shardwise.spec.block import Amount, Attention, Collective, PartCosts, Product
from shardwise.spec.cluster import ClusterSpec

Terms = dict[str, Any]
# The head size at which a chip's attention efficiency is given, and the size that halves it.
_HEAD_SIZE, _HALF_HEAD = 128, 96
_HALF_ROW = 256  # keys of a query at which a fused kernel reaches half its speed
_BACKWARD_ATTENTION = 2.5 / 0.85  # five products where forward has two, at a lower rate (Dao 2023, arXiv:2307.08691)


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch: ``forward``, ``backward``, and what is computed again before the backward pass."""

    forward: Terms
    backward: Terms
    again: Terms


def add_terms(*many: Terms) -> Terms:
    """Sums by name."""
    total: Terms = {}
    for terms in many:
        for name, value in terms.items():
            total[name] = total.get(name, 0.0) + value
    return total


def scale_terms(terms: Terms, factor: Any) -> Terms:
    """All terms times a factor."""
    return {name: value * factor for name, value in terms.items()}


def total(terms: Terms) -> Any:
    """The sum of all terms."""
    return sum(terms.values(), start=0.0)


def part_passes(part: PartCosts, layout: Layout, work: Work, cluster: ClusterSpec) -> Passes:
    """Seconds of a part on one rank for one micro-batch; ``again`` is empty unless the layout recomputes."""
    forward = _pass(part, layout, work, cluster, backward=False)
    backward = _pass(part, layout, work, cluster, backward=True)
    accumulation = rank_parameters(part.trainable, part, layout) * work.accumulation_bytes
    backward["accumulation"] = accumulation / _memory_rate(cluster)
    again: Terms = {}
    if layout.recompute == "full":
        again = dict(forward) if work.recompute_sends else {**forward, "tensor": forward["tensor"] * 0}
    elif layout.recompute == "selective":
        again = {"elementwise": forward["elementwise"]}
        if part.attention is not None and part.attention.kernel == "eager":
            again["attention"] = forward["attention"]
    return Passes(*(scale_terms(terms, part.passes) for terms in (forward, backward, again)))


def rank_parameters(parameters: Any, part: PartCosts, layout: Layout) -> Any:
    """Weights of a part on one rank, before data ranks share anything out."""
    whole = parameters.whole
    override = part.degree(layout.tp).whole
    if override is not None and parameters is part.trainable and any(".lora_" in one.name for one in part.products):
        pass  # adapters say themselves which half of them is whole; the override is of what is frozen beside them
    elif override is not None and part.parameters.whole:
        whole = whole * override / part.parameters.whole
    elif override is not None and part.parameters.split:
        whole = parameters.split * override / part.parameters.split
    cut = parameters.split + parameters.whole - whole
    experts = parameters.expert / layout.ep / (layout.tp if layout.expert_tensor else 1)
    return cut / layout.tp + whole + experts


def expert_parameters(parameters: Any, layout: Layout) -> Any:
    """The weights of routed experts among :func:`rank_parameters`."""
    return parameters.expert / layout.ep / (layout.tp if layout.expert_tensor else 1)


def product_weights(product: Product, layout: Layout) -> Any:
    """Weights of the matrices of a product on one rank, before data ranks share anything out."""
    number = product.inner * product.outer * product.copies
    if product.copies > 1:
        return number / layout.ep / (layout.tp if layout.expert_tensor else 1)
    return number if product.split == "none" else number / layout.tp


def rank_tokens(layout: Layout, work: Work) -> Any:
    """Tokens of a micro-batch on one rank, before sequence parallelism."""
    return layout.micro_batch * work.sequence / layout.cp


def amount_bytes(amount: Amount, layout: Layout, work: Work) -> Any:
    """Bytes of an amount for one micro-batch on one rank."""
    tokens, size, positions = rank_tokens(layout, work), work.compute_bytes, work.sequence
    split = amount.split * size + amount.split_bytes
    split += (amount.split_growing * size + amount.split_growing_bytes) * positions
    whole = amount.whole * size + amount.whole_bytes
    spread = layout.tp if layout.sequence_parallel else 1
    # Experts that no tensor rank cuts have the tokens shared out over the ranks instead.
    routed = amount.routed * size / (1 if layout.expert_tensor else layout.tp)
    expert = amount.expert * size + amount.expert_bytes
    return tokens * (split / layout.tp + whole / spread + expert / layout.tp + routed)


def _pass(part: PartCosts, layout: Layout, work: Work, cluster: ClusterSpec, backward: bool) -> Terms:
    stack, chip = cluster.stack, cluster.chip
    traffic = amount_bytes(part.backward_traffic if backward else part.forward_traffic, layout, work)
    operators: Any = part.operators
    if part.dispatched:
        local = max((one.copies for one in part.products), default=1) / layout.ep
        operators = operators + local * work.expert_operators
        more = Amount(routed=(part.backward_traffic if backward else part.forward_traffic).routed)
        traffic = traffic + amount_bytes(more, layout, work) * (work.expert_traffic - 1.0)
    operators = operators * (1.5 if backward else 1.0)
    products = sum((product_seconds(one, layout, work, cluster, backward) for one in part.products), start=0.0)
    attention = _attention(part.attention, layout, work, cluster, backward)
    elementwise = traffic / _memory_rate(cluster) + operators * chip.kernel_seconds
    terms: Terms = {
        "matmul": products * stack.slowdown * work.host.product,
        "attention": attention * stack.attention,
        "elementwise": elementwise * stack.slowdown,
    }
    terms["launch"] = largest(operators * stack.host_seconds - total(terms), 0.0)
    terms["tensor"] = _tensor(part, layout, work, cluster, backward)
    terms["context"] = _context(part.attention, layout, work, cluster, backward)
    terms["expert"] = _dispatch(part, layout, work, cluster)
    return terms


def product_seconds(product: Product, layout: Layout, work: Work, cluster: ClusterSpec, backward: bool) -> Any:
    """Roofline of a product, whose speed falls as any of its sides gets short."""
    times = int(product.trainable) + int(product.input_gradient) if backward else 1
    tokens = rank_tokens(layout, work) * product.uses
    inner, outer, copies = float(product.inner), float(product.outer), 1.0
    cut = layout.tp if product.copies == 1 or layout.expert_tensor else 1
    if product.split == "inner":
        inner = inner / cut
    elif product.split == "outer":
        outer = outer / cut
    elif product.copies == 1 and layout.sequence_parallel:
        tokens = tokens / layout.tp
    if product.copies > 1:
        copies = product.copies / layout.ep
        tokens = tokens / copies if layout.expert_tensor else tokens / layout.tp / copies
    chip = cluster.chip
    rate = cluster.peak(work.precision) * chip.matmul_efficiency
    for side in (tokens, inner, outer):
        rate = rate * side / (side + chip.half_size)
    moved = (tokens * inner + inner * outer + tokens * outer) * work.compute_bytes
    return times * copies * largest(2.0 * tokens * inner * outer / rate, moved / _memory_rate(cluster))


def _attention(attention: Attention | None, layout: Layout, work: Work, cluster: ClusterSpec, backward: bool) -> Any:
    if attention is None:
        return 0.0
    tokens, heads = rank_tokens(layout, work), attention.heads / _head_ranks(attention, layout)
    widths = attention.qk_dim + attention.v_dim
    # Products in eight or four bits leave attention in sixteen.
    precision = "bf16" if work.precision in ("fp8", "fp4") else work.precision
    chip, peak = cluster.chip, cluster.peak(precision)
    if attention.kernel == "linear":
        flops = 2.0 * tokens * heads * attention.qk_dim * attention.v_dim * 2
        return flops / (peak * chip.attention_efficiency) * (2 if backward else 1)
    keys: float = work.sequence
    if attention.kernel == "eager":
        return _eager_attention(tokens, heads, keys, attention, (work, cluster)) * (2 if backward else 1)
    window = min(attention.window or work.sequence, work.sequence)
    seen = window * (1 - window / (2 * work.sequence)) if attention.causal else keys
    speed = (widths / 2) / (widths / 2 + _HALF_HEAD) * (_HEAD_SIZE + _HALF_HEAD) / _HEAD_SIZE
    speed = speed * seen / (seen + _HALF_ROW)
    rate = peak * chip.attention_efficiency * smallest(speed, 1.3)
    return 2.0 * tokens * heads * seen * widths / rate * (_BACKWARD_ATTENTION if backward else 1.0)


def _head_ranks(attention: Attention, layout: Layout) -> Any:
    """The tensor ranks that share the heads."""
    return layout.tp if attention.split else 1


def _eager_attention(tokens: Any, heads: Any, keys: float, attention: Attention, on: tuple[Work, ClusterSpec]) -> Any:
    """Two batched products for each head; what softmax reads and writes is counted as traffic."""
    work, cluster = on
    chip = cluster.chip
    seconds: Any = 0.0
    for width in (attention.qk_dim, attention.v_dim):
        speed = keys / (keys + chip.half_size) * width / (width + chip.half_size)
        compute = 2.0 * tokens * heads * keys * width / (cluster.peak(work.precision) * chip.matmul_efficiency * speed)
        moved = tokens * heads * (keys + 2 * width) * work.compute_bytes
        seconds = seconds + largest(compute, moved / _memory_rate(cluster))
    return seconds


def _tensor(part: PartCosts, layout: Layout, work: Work, cluster: ClusterSpec, backward: bool) -> Any:
    split = part.degree(layout.tp)
    chosen = split.sequence if layout.sequence_parallel else split.collectives
    assert chosen is not None, f"{part.name} cannot run with sequence parallelism"
    seconds = sum((_collective(one, layout, work, cluster, backward) for one in chosen), start=0.0)
    return seconds * (1.0 - work.overlap_tensor)


def _collective(one: Collective, layout: Layout, work: Work, cluster: ClusterSpec, backward: bool) -> Any:
    times = one.backward if backward else one.forward
    size = rank_tokens(layout, work) * one.elements * work.compute_bytes
    host = work.host.collective * cluster.chip.kernel_seconds if layout.tp > 1 else 0.0
    return times * (collective_seconds(one.op, size, layout.tp, 1, cluster) + host)


def _context(attention: Attention | None, layout: Layout, work: Work, cluster: ClusterSpec, backward: bool) -> Any:
    """Ring attention: keys and values go round, backward with their gradients; all-to-all swaps heads for rows."""
    if attention is None:
        return 0.0
    tokens = rank_tokens(layout, work)
    keys = attention.kv_heads * (attention.qk_dim + attention.v_dim) / _head_ranks(attention, layout)
    if not layout.ring_attention:
        queries = attention.heads * (attention.qk_dim + attention.v_dim) / _head_ranks(attention, layout)
        size = tokens * (queries + keys) * work.compute_bytes
        return collective_seconds("all_to_all", size, layout.cp, layout.tp, cluster)
    size = tokens * layout.cp * keys * work.compute_bytes * (2 if backward else 1)
    seconds = collective_seconds("all_gather", size, layout.cp, layout.tp, cluster)
    if not work.overlap_context:
        return seconds
    compute = _attention(attention, layout, work, cluster, backward) * cluster.stack.attention
    return largest(seconds - compute, 0.1 * seconds)


def _dispatch(part: PartCosts, layout: Layout, work: Work, cluster: ClusterSpec) -> Any:
    """Tokens go to their experts and come back."""
    if not part.dispatched:
        return 0.0
    size = rank_tokens(layout, work) * part.dispatched * work.compute_bytes
    if layout.sequence_parallel or not layout.expert_tensor:
        size = size / layout.tp
    stride = layout.tp if layout.expert_tensor else 1
    return 2 * collective_seconds("all_to_all", size, layout.ep, stride, cluster)


def _memory_rate(cluster: ClusterSpec) -> float:
    return cluster.chip.memory_bandwidth * cluster.chip.bandwidth_efficiency
