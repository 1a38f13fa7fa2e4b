"""What of a plan is run on its small copy: layouts of a few processes, and what they leave out. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from shardwise.spec.plan import Plan
from shardwise.spec.strategy import AXES, Strategy, default_stages

MAX_PROCESSES = 8
NUM_STEPS = 3
_MAX_ROWS, _MICRO_BATCHES = 2, 4  # rows of a micro-batch, micro-batches of a step on a data rank


def tensor_degree(strategy: Strategy) -> int:
    """The tensor degree of the copy: the smallest divisor above 1 of the plan's; 1 where that is too many processes."""
    least = next((n for n in range(2, MAX_PROCESSES + 1) if strategy.tp % n == 0), 1)
    return least if strategy.tp > 1 else 1


def layouts(strategy: Strategy) -> list[dict[str, int]]:
    """Degrees by axis: one layout with every axis above 1, or several that leave one out where there are too many."""
    degrees = {axis: 1 if getattr(strategy, axis) == 1 else 2 for axis in AXES} | {"tp": tensor_degree(strategy)}
    if prod(degrees.values()) <= MAX_PROCESSES:
        return [degrees]
    used = [axis for axis in AXES if degrees[axis] > 1]
    found: list[dict[str, int]] = []
    for left_out in ("dp_replicate", "tp", "dp_shard", "pp"):
        smaller = degrees | {left_out: 1}
        covered = {axis for layout in found for axis in used if layout[axis] > 1}
        if left_out in used and prod(smaller.values()) <= MAX_PROCESSES and not covered >= set(used):
            found.append(smaller)
    alone = [axis for axis in used if not any(layout[axis] > 1 for layout in found)]
    return [*found, *(dict.fromkeys(AXES, 1) | {axis: degrees[axis]} for axis in alone)]


def num_stages(strategy: Strategy, degrees: dict[str, int]) -> int:
    """Stages of a layout: each of its pipeline ranks has as many as one of the plan's."""
    return degrees["pp"] * (len(strategy.stages) // strategy.pp)


def small_strategy(plan: Plan, degrees: dict[str, int], num_blocks: int) -> Strategy:
    """The strategy of one layout on a copy of ``num_blocks`` blocks; everything but sizes is the plan's."""
    strategy = plan.strategy
    stages = default_stages(num_blocks, num_stages(strategy, degrees))
    return replace(
        strategy,
        pp=degrees["pp"],
        dp_replicate=degrees["dp_replicate"],
        dp_shard=degrees["dp_shard"],
        tp=degrees["tp"],
        stages=stages,
        micro_batch_size=min(strategy.micro_batch_size, _MAX_ROWS),
        recompute=min(strategy.recompute, max(stages)),
        sequence_parallel=strategy.sequence_parallel and degrees["tp"] > 1,
        tp_whole=None,  # of the true sizes: the copy is given the table that it leads to
    )


def num_micro_batches(plan: Plan) -> int:
    """Micro-batches of a step on each data rank of the copy."""
    return min(plan.num_micro_batches, _MICRO_BATCHES)


@dataclass(frozen=True)
class Coverage:
    """What a check compared, by subject, and what it did not."""

    covered: dict[str, str]
    not_covered: list[str]


def coverage(plan: Plan, chosen: list[dict[str, int]], precision: str, compiled: bool) -> Coverage:
    """What running ``chosen`` in the place of ``plan`` shows, but for what only the model's own copy tells."""
    strategy = plan.strategy
    covered = {
        "layouts": "; ".join(_shown(layout) for layout in chosen),
        "in numbers": f"{strategy} at its true degrees: heads, KV heads, vocabulary, blocks, batch",
    }
    if strategy.tp > 1:
        bound = "" if strategy.tp_whole is None else f", within tp_whole = {strategy.tp_whole:g}"
        covered["tensor table"] = f"of degree {strategy.tp}{bound}: found and proven on simulated ranks"
    if strategy.recompute:
        covered["recompute"] = "all blocks" if strategy.recompute < 0 else f"{strategy.recompute} blocks a stage"
    left_out = [
        f"the true size of {axis} {size}"
        for axis in AXES
        if (size := getattr(strategy, axis)) > max(layout[axis] for layout in chosen)
    ]
    if strategy.tp > plan.model.num_kv_heads and plan.model.num_kv_heads % tensor_degree(strategy) == 0:
        left_out.append(f"more tensor ranks than the {plan.model.num_kv_heads} KV heads, but on simulated ranks")
    used = [axis for axis in AXES if getattr(strategy, axis) > 1]
    if not any(all(layout[axis] > 1 for axis in used) for layout in chosen):
        left_out.append(f"{', '.join(used)} all at once")
    if plan.table is not None:
        left_out.append("the table of strategy.plan: the copy finds its own, a run proves the plan's")
    if plan.device_type != "cpu":
        left_out.append(f"the kernels and collectives of {plan.device_type}")
    if precision == "bf16":
        left_out.append("bf16")
    if compiled:
        left_out.append("compiled blocks")
    left_out.append("the weights, the data and its loading")
    return Coverage(covered, left_out)


def _shown(layout: dict[str, int]) -> str:
    return " x ".join(f"{axis} {layout[axis]}" for axis in AXES if layout[axis] > 1) or "one process"
