"""What a micro-batch of each candidate costs in an average block, the embedding and the head: seconds and bytes.

Of all candidates of a group at once, as the quick judgement wants it: by row, from the formulas of single parts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.planner.compute import part_passes, total
from shardwise.planner.halves import waiting_bytes, waiting_seconds
from shardwise.planner.job import Job
from shardwise.planner.layout import Layout
from shardwise.planner.memory import saved_bytes, workspace_bytes
from shardwise.spec.block import PartCosts

_SUMMED = ("forward", "backward", "again", "saved", "saved_all", "workspace", "waiting", "waiting_bytes")


@dataclass(frozen=True)
class Rates:
    """Of one micro-batch on one rank, by row of the group: of an average block, the embedding, the head."""

    forward: Any
    backward: Any
    again: Any
    first: Any
    last: Any
    saved: Any
    saved_all: Any
    saved_first: Any
    saved_last: Any
    workspace: Any
    workspace_first: Any
    workspace_last: Any
    waiting: Any
    waiting_bytes: Any
    forward_share: Any
    unit_forward: Any
    unit_backward: Any
    unit_later: Any


def rates_of(job: Job, layout: Layout, width: int) -> Rates:
    """The rates of ``width`` rows, whose degrees may be columns in ``layout``."""
    costs, work = job.costs, job.work
    plain = replace(layout, recompute="none")
    sums: dict[str, Any] = dict.fromkeys(_SUMMED, 0.0)
    forward_share: Any = 1.0
    for kind, times in blocks_by_kind(job):
        share = times / costs.num_blocks
        passes = part_passes(kind, layout, work, job.cluster)
        for name in ("forward", "backward", "again"):
            sums[name] = sums[name] + share * total(getattr(passes, name))
        sums["waiting"] = sums["waiting"] + share * waiting_seconds(kind, layout, work, job.cluster)
        sums["waiting_bytes"] = sums["waiting_bytes"] + share * waiting_bytes(kind, layout, work)
        kept = saved_bytes(kind, layout.recompute, layout, work)
        everything = saved_bytes(kind, "none", layout, work)
        sums["saved"] = sums["saved"] + share * kept
        sums["saved_all"] = sums["saved_all"] + share * everything
        sums["workspace"] = np.maximum(sums["workspace"], workspace_bytes(kind, layout.recompute, layout, work))
        if kind is job.costs.kinds[commonest(job)[0]]:
            always = layout.recompute != "full" or job.fixed.get("recompute") == "full"
            sums["unit_forward"] = total(passes.forward)
            sums["unit_backward"] = total(passes.backward) + (total(passes.again) if always else 0.0)
            sums["unit_later"] = waiting_seconds(kind, layout, work, job.cluster)
        whole = total(passes.forward) + total(passes.backward) + total(passes.again)
        forward_share = np.minimum(forward_share, total(passes.forward) / whole)
    ends: list[Any] = []
    for parts in ((costs.embedding,), (costs.head, *costs.more)):
        passes_of = [part_passes(part, plain, work, job.cluster) for part in parts]
        ends.append(sum(total(one.forward) + total(one.backward) for one in passes_of))
    saved = [saved_bytes(part, "none", layout, work) for part in (costs.embedding, costs.head)]
    more = sum((saved_bytes(part, "none", layout, work) for part in costs.more), start=0.0)
    values = sums | {
        "forward_share": forward_share,
        "first": ends[0],
        "last": ends[1],
        "saved_first": saved[0],
        "saved_last": saved[1] + more,
        "workspace_first": workspace_bytes(costs.embedding, "none", layout, work),
        "workspace_last": workspace_bytes(costs.head, "none", layout, work),
    }
    return Rates(**{name: np.broadcast_to(np.asarray(value, dtype=float), (width,)) for name, value in values.items()})


def blocks_by_kind(job: Job) -> list[tuple[PartCosts, int]]:
    """Each kind of block with the number of blocks that are of it."""
    return [(job.costs.kinds[kind], times) for kind, times in sorted(Counter(job.costs.order).items())]


def commonest(job: Job) -> tuple[int, int]:
    """The kind that most blocks are of, and how many are."""
    return Counter(job.costs.order).most_common(1)[0]
