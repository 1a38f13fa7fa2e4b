"""Which parts of a model lie on which stage, and what of them trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

from shardwise.planner.layout import Layout
from shardwise.spec.block import ModelCosts, Parameters, PartCosts, RecomputeLevel

Placed = tuple[PartCosts, int, RecomputeLevel]  # a part, times, and what of it is computed again


def stage_parts(costs: ModelCosts, layout: Layout) -> list[list[Placed]]:
    """The parts of each stage; a stage's first blocks are those that are recomputed."""
    stages = layout.stages or (costs.num_blocks,)
    result: list[list[Placed]] = []
    for stage, (size, stop) in enumerate(zip(stages, accumulate(stages), strict=True)):
        kinds = costs.order[stop - size : stop]
        again = layout.recomputed[stage] if layout.recomputed else (0 if layout.recompute == "none" else size)
        placed: list[Placed] = []
        for level, some in ((layout.recompute, kinds[:again]), ("none", kinds[again:])):
            placed += [(costs.kinds[kind], times, level) for kind, times in sorted(Counter(some).items())]
        if stage == 0:
            placed.append((costs.embedding, 1, "none"))
        if stage == len(stages) - 1:
            placed.append((costs.head, 1, "none"))
            placed += [(part, 1, "none") for part in costs.more]
        result.append(placed)
    return result


def frozen(costs: ModelCosts) -> ModelCosts:
    """The same model with nothing but small adapters to train: a hundredth of each block's weights."""

    def part(one: PartCosts) -> PartCosts:
        small = Parameters(one.parameters.split // 100, 0, one.parameters.expert // 100)
        return replace(
            one, trainable=small, products=tuple(replace(product, trainable=False) for product in one.products)
        )

    kinds = tuple(part(one) for one in costs.kinds)
    return replace(costs, kinds=kinds, embedding=part(costs.embedding), head=part(costs.head))
