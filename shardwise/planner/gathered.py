"""What the quick judgement counts of weights that are gathered, over columns of candidates."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.planner.data import dense_and_expert
from shardwise.planner.job import Job
from shardwise.planner.layout import Layout
from shardwise.planner.parts import tied_copy
from shardwise.planner.state import gathered_bytes


def job_gathered_bytes(job: Job, layout: Layout) -> Any:
    """What comes and goes with the traffic of the data ranks, on a rank that has both ends or the larger one."""
    copies = [tied_copy(job.costs)] if job.costs.tied else []
    size = {
        name: sum(dense_and_expert([(part, 1, "none") for part in parts], layout, trainable=False))
        for name, parts in (
            ("first", [job.costs.embedding]),
            ("last", [job.costs.head, *copies]),
            ("both", [job.costs.embedding, job.costs.head]),
        )
    }
    ends = np.where(layout.pp > 1, np.maximum(size["first"], size["last"]), size["both"])
    if not job.work.ours:
        ends = np.maximum(size["first"], size["last"])
    blocks, trained = (
        [sum(dense_and_expert([(kind, 1, "none")], layout, trainable)) for kind in job.costs.kinds]
        for trainable in (False, True)
    )
    return gathered_bytes(blocks, trained, ends, layout, job.work)
