"""Memory of one pipeline rank at its peak, by named terms that sum to the total."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.planner.arrays import smallest
from shardwise.planner.compute import amount_bytes
from shardwise.planner.data import dense_and_expert
from shardwise.planner.layout import Layout, Work
from shardwise.planner.parts import Placed
from shardwise.planner.simulate import peak_bytes
from shardwise.spec.block import Amount
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.schedule import Action

_SLACK = 0.06  # of what comes and goes: what the allocator keeps in pieces too small to use


def rank_memory(
    stages: Sequence[Sequence[Placed]], actions: Sequence[Action], layout: Layout, work: Work, cluster: ClusterSpec
) -> dict[str, float]:
    """Bytes of a rank that holds ``stages`` and runs ``actions``."""
    parts = [placed for stage in stages for placed in stage]
    terms = _state(parts, layout, work)
    blocks: dict[int, float] = {}
    logits: dict[int, float] = {}
    for stage, placed in zip(sorted({action.stage for action in actions}), stages, strict=True):
        heads = [one for one in placed if one[0].name == "head"]
        rest = [one for one in placed if one[0].name != "head"]
        blocks[stage], logits[stage] = _saved(rest, layout, work), _saved(heads, layout, work)
    size = max(blocks) + 1
    both = [blocks.get(s, 0.0) + logits.get(s, 0.0) for s in range(size)]
    alone = [blocks.get(s, 0.0) for s in range(size)]
    terms["activations"] = peak_bytes(actions, alone)
    terms["logits"] = peak_bytes(actions, both) - terms["activations"]
    terms["workspace"] = max(_workspace(one, layout, work) for one in parts)
    terms["gathered"] = _gathered(parts, layout, work)
    if work.counted != "tensors":
        terms["slack"] = _SLACK * (terms["activations"] + terms["logits"] + terms["workspace"])
    if work.counted == "device":
        terms["base"] = work.base_bytes
    return {name: float(value) for name, value in terms.items()}


def _state(parts: Sequence[Placed], layout: Layout, work: Work) -> dict[str, Any]:
    held = dense_and_expert(parts, layout, trainable=False)
    trained = dense_and_expert(parts, layout, trainable=True)
    shares = (layout.shard, smallest(layout.shard, layout.expert_data_ranks))

    def over(amounts: tuple[Any, Any], from_level: int) -> Any:
        shared = layout.zero >= from_level
        return sum(amount / (share if shared else 1) for amount, share in zip(amounts, shares, strict=True))

    return {
        "weights": over(held, 3) * work.weight_bytes,
        "gradients": over(trained, 2) * work.gradient_bytes,
        "optimizer": over(trained, 1) * work.optimizer_bytes,
    }


def _saved(parts: Sequence[Placed], layout: Layout, work: Work) -> float:
    return float(
        sum(times * amount_bytes(part.saved.get(level, Amount()), layout, work) for part, times, level in parts)
    )


def _workspace(placed: Placed, layout: Layout, work: Work) -> float:
    """What is alive only while one part runs backward: what it computes again, and gradients of the same size."""
    part, _, level = placed
    everything = float(amount_bytes(part.saved.get("none", Amount()), layout, work))
    kept = float(amount_bytes(part.saved.get(level, Amount()), layout, work))
    return everything - kept + (0.0 if part.name == "head" else 0.5 * everything)


def _gathered(parts: Sequence[Placed], layout: Layout, work: Work) -> float:
    """Whole weights of two parts and gradients of one, where the data ranks share them out."""
    if layout.zero < 3:
        return 0.0
    sizes = [sum(dense_and_expert([(part, 1, level)], layout, trainable=False)) for part, _, level in parts]
    return float(max(sizes) * (2 * work.sent_weight_bytes + work.sent_gradient_bytes))
