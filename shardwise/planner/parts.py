"""Which parts of a model lie on which stage, and what of them trains."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from shardwise.planner.layout import Layout
from shardwise.spec.block import ModelCosts, Parameters, PartCosts, RecomputeLevel, TensorSplit

TIED_COPY = "tied copy"
ENDS = ("embedding", "head", TIED_COPY)  # names of parts around the blocks
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
        if stage == (0 if layout.folded else len(stages) - 1):
            placed.append((costs.head, 1, "none"))
            placed += [(part, 1, "none") for part in costs.more]
            if costs.tied and stage:
                placed.append((tied_copy(costs), 1, "none"))
        result.append(placed)
    return result


def tied_copy(costs: ModelCosts) -> PartCosts:
    """The copy of a tied embedding that a last stage holds beside the head, where the first stage is another one."""
    number, embedding = costs.tied_parameters, costs.embedding
    degrees = []
    for split in embedding.degrees:
        is_whole = split.whole is not None and split.whole >= number
        sequence = None if split.sequence is None else ()
        degrees.append(TensorSplit(split.degree, split.rule, (), sequence, number if is_whole else None))
    own = Parameters(split=number) if embedding.parameters.split >= number else Parameters(whole=number)
    trains = embedding.trainable.total >= number
    return PartCosts(TIED_COPY, own, own if trains else Parameters(), degrees=tuple(degrees))
