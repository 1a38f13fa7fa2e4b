"""What each part of the planner's model is worth: the error on published runs when one is taken out.

What is left is scaled by one factor a source, so that a part counts only for what a constant cannot stand in for.

    python benchmarks/ablate_planner.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

from benchmarks.fit_planner import load
from shardwise.planner.cost import estimate
from shardwise.planner.runs import Run
from shardwise.spec.cluster import ClusterSpec

SAME_EFFICIENCY = 0.5  # of every kernel on every chip


def as_it_is(run: Run) -> float:
    """Nothing taken out."""
    return estimate(run.costs, run.cluster, run.layout, run.work).step_seconds


def one_efficiency(run: Run) -> float:
    """Every product and every attention at the same share of the peak, whatever the chip."""
    chip = replace(run.cluster.chip, matmul_efficiency=SAME_EFFICIENCY, attention_efficiency=SAME_EFFICIENCY)
    return _with(run, replace(run.cluster, chip=chip))


def no_size(run: Run) -> float:
    """Small products as fast as large ones, nothing waits for the host."""
    chip = replace(run.cluster.chip, half_size=0.0, kernel_seconds=0.0)
    return _with(run, replace(run.cluster, chip=chip, stack=replace(run.cluster.stack, host_seconds=0.0)))


def no_bubble(run: Run) -> float:
    """Pipeline ranks never wait: no bubble, and no stage that holds the head."""
    made = estimate(run.costs, run.cluster, run.layout, run.work)
    return made.step_seconds - made.time_terms["bubble"]


def one_card(run: Run) -> float:
    """A group that leaves a node uses one network card of it, and no traffic runs beside compute."""
    links = run.cluster.links
    shared = replace(links[-1], bandwidth=links[-1].bandwidth / run.cluster.devices_per_node)
    cluster = replace(run.cluster, links=(*links[:-1], shared))
    return estimate(run.costs, cluster, run.layout, replace(run.work, overlap_data=False)).step_seconds


def one_stack(run: Run) -> float:
    """The same software everywhere."""
    stack = replace(run.cluster.stack, slowdown=1.1, attention=1.1, host_seconds=8e-6)
    return _with(run, replace(run.cluster, stack=stack))


def _with(run: Run, cluster: ClusterSpec) -> float:
    return estimate(run.costs, cluster, run.layout, run.work).step_seconds


PARTS: dict[str, Callable[[Run], float]] = {
    "nothing": as_it_is,
    "efficiency by chip and kernel": one_efficiency,
    "overhead and size": no_size,
    "bubble and head": no_bubble,
    "all network cards, overlap": one_card,
    "software stack": one_stack,
}


def dense_runs() -> list[Run]:
    """The scored rows of models without experts."""
    return [run for run, _ in load() if run.costs.num_experts == 0]


def error(runs: Sequence[Run], predicted: Callable[[Run], float]) -> tuple[float, float]:
    """The mean error of predictions, and what is left of it after one factor a source."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        ratios[run.source].append(predicted(run) / (run.seconds or 1.0))
    raw = fmean(abs(ratio - 1) for some in ratios.values() for ratio in some)
    return raw, fmean(abs(ratio / median(some) - 1) for some in ratios.values() for ratio in some)


def main() -> None:
    """One line a part."""
    runs = dense_runs()
    for name, predicted in PARTS.items():
        raw, scaled = error(runs, predicted)
        print(f"without {name:30s} {raw:6.1%}, after one factor a source {scaled:6.1%}", flush=True)


if __name__ == "__main__":
    main()
