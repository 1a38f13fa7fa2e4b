"""The search: all legal candidates are judged at once, the best of them stage by stage; the fastest that fit remain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from shardwise.planner.bounds import least_blocks
from shardwise.planner.job import Candidate, Found, Job, Planned
from shardwise.planner.rates import commonest
from shardwise.planner.refine import refine
from shardwise.planner.refusal import no_plan
from shardwise.planner.screen import least_device_seconds
from shardwise.planner.space import Columns, enumerate_space
from shardwise.planner.sweep import REFINED, Sweep, candidate_of, not_runnable

_MOST_REFINED = 160
_MOST_ALIKE = 8  # with the same degrees
_BOUNDING = ("bound", "pp", "dp", "m", "v", "unit", "later", "ahead", "behind")
_STEP = 0.01  # of a block's time, to which shares of it are rounded for bounds
_NEAR = 1.02  # and further ones whose guess is as near to the best as this
_DEGREES = ("pp", "dp", "cp", "tp", "ep")


def search(job: Job, top: int = 5, only_runnable: bool = False) -> Found:
    """The fastest plans that fit, the first the best; pure.

    All candidates on more than half of the devices are judged, then those on fewer as long as fewer could be faster.

    Raises:
        PlanError: nothing fits, or a given field is illegal; the message names the least need and a change that fits.
    """
    plans: list[Planned] = []
    sweep = Sweep(job, only_runnable)
    refined, bound = 0, float("inf")
    most = job.devices
    per_row: float | None = None
    while most >= 1:
        space = enumerate_space(job, most - 1 if job.all_devices else most // 2, most)
        sweep.run(space)
        found, looked_at, least = _refine_best(job, sweep, top)
        plans, refined = _best(plans + found, top), refined + looked_at
        bound = min(bound, least)
        most //= 2
        if not most or job.all_devices or (not plans and sweep.considered and most < job.devices // 4):
            break
        if plans:
            per_row = least_device_seconds(job, _cells(space.columns)) if per_row is None else per_row
            if len(space) and job.rows * per_row / most >= plans[0].step_seconds:
                break
    if not plans:
        raise no_plan(job, sweep)
    rejected = tuple(sweep.rejected.values())
    bound = min(bound, plans[0].step_seconds)
    return Found(tuple(plans), rejected, sweep.considered, refined, bound, tuple(sweep.points))


def _cells(columns: Columns) -> Columns:
    """``tp cp ep m`` of a space in every combination: fewer devices allow for no other numbers of them."""
    axes = [np.unique(columns[name]) for name in ("tp", "cp", "ep", "m")]
    grids = np.meshgrid(*axes, indexing="ij")
    return {name: grid.ravel() for name, grid in zip(("tp", "cp", "ep", "m"), grids, strict=True)}


def _refine_best(job: Job, sweep: Sweep, top: int) -> tuple[list[Planned], int, float]:
    """Plans made of the candidates with the best guesses, how many were looked at, and a bound on all others.

    Those of the first tables are looked at as if there were no others. Of other tables only those are whose guess is
    near the best plan, so that more tables never make it slower.
    """
    columns = sweep.pool.columns
    can = sweep.runnable(columns)
    done: set[int] = set()
    plans: list[Planned] = []
    for table in range(len(job.by_table)):
        of_table = columns["table"] == table
        for some, number, only_runnable in ((of_table, top, False), (of_table & can, 1, True)):
            known = [plan for plan in plans if not (only_runnable and plan.not_runnable)]
            order = np.flatnonzero(some)
            order = _with_others_first(columns, order[np.argsort(columns["seconds"][order], kind="stable")], top)
            least = 0 if table and known else REFINED
            plans += _refine_in_order(job, sweep, order, (known, done), (least, number))
    left = np.ones(len(sweep.pool), dtype=bool)
    left[list(done)] = False
    bound = min(_bound(job, {name: column[left] for name, column in columns.items()}), sweep.bound)
    sweep.forget()
    return plans, len(done), bound


def _refine_in_order(
    job: Job, sweep: Sweep, order: np.ndarray, so_far: tuple[Sequence[Planned], set[int]], numbers: tuple[int, int]
) -> list[Planned]:
    """Plans made of rows of the pool in their order, until their guesses are behind.

    Args:
        so_far: the plans that these must beat, and the rows that were looked at, to which these are added.
        numbers: of rows that are looked at in any case, and of plans that are wanted.
    """
    columns = sweep.pool.columns
    (known, done), (least, wanted) = so_far, numbers
    own: list[Planned] = []
    counts: Counter[tuple[float, ...]] = Counter()
    for looked_at, index in enumerate(order.tolist()):
        every = [*known, *own]
        near = columns["seconds"][index] < _NEAR * min((plan.step_seconds for plan in every), default=np.inf)
        enough = looked_at >= least and len(every) >= min(wanted, REFINED)
        if (enough and not near) or looked_at >= _MOST_REFINED:
            break
        kind = tuple(columns[name][index] for name in _DEGREES)
        if index in done or counts[kind] >= _MOST_ALIKE or columns["bound"][index] > _slowest_told(every, wanted):
            continue
        done.add(index)
        counts[kind] += 1
        plan, need = refine(job, candidate_of(job, columns, index))
        if plan is not None:
            own.append(replace(plan, not_runnable=not_runnable(plan.candidate, job.work.precision)))
        else:
            sweep.refused_need = min(sweep.refused_need, need)
    return own


def _slowest_told(plans: Sequence[Planned], number: int) -> float:
    """Seconds above which a plan is none of the ``number`` best with other degrees."""
    best: dict[Hashable, float] = {}
    for plan in plans:
        kind = _spread(plan.candidate)
        best[kind] = min(best.get(kind, np.inf), plan.step_seconds)
    return sorted(best.values())[number - 1] if len(best) >= number else np.inf


def _bound(job: Job, columns: Columns) -> float:
    """Seconds that no row can be below, the rows with the lowest bounds looked at closely."""
    _, blocks = commonest(job)
    even = not job.fixed.get("stages") and blocks == job.costs.num_blocks
    least = float("inf")
    for index in np.argsort(columns["bound"], kind="stable").tolist():
        row = {name: float(columns[name][index]) for name in _BOUNDING}
        if row["bound"] >= least:
            break
        bound = row["bound"]
        if job.cluster.chip.shared <= 1 and (row["v"] == 1 or even):
            shares = (-(-row["later"] // _STEP), row["ahead"] // _STEP, row["behind"] // _STEP)
            number = job.rows // int(row["dp"] * row["m"])
            close = least_blocks(blocks, int(row["pp"]), number, int(row["v"]), *(share * _STEP for share in shares))
            bound = max(bound, close * row["unit"])
        least = min(least, bound)
    return least


def _with_others_first(columns: Columns, order: np.ndarray, top: int) -> np.ndarray:
    """The rows in order, but the best one of each of the ``top`` best combinations of degrees first."""
    degrees = np.stack([columns[name][order] for name in _DEGREES], axis=1)
    _, firsts = np.unique(degrees, axis=0, return_index=True)
    early = np.sort(firsts)[:top]
    late = np.setdiff1d(np.arange(len(order)), early)
    return order[np.concatenate([early, late]).astype(np.int64)]


def _best(plans: list[Planned], top: int) -> list[Planned]:
    """The fastest plans that differ, ``top`` of them if there are as many, and the fastest that can be trained with.

    Plans differ in degrees, and in more than a row's tokens over ranks in place of rows; where too few do, in what
    else a strategy says of a step, at last in anything.
    """
    unique = {plan.candidate: plan for plan in plans}
    ranked = sorted(unique.values(), key=_rank)
    kept: list[Planned] = []
    kinds: tuple[Callable[[Candidate], Hashable], ...] = (_spread, _degrees, _manner, lambda candidate: candidate)
    for kind in kinds:
        seen = {kind(plan.candidate) for plan in kept}
        for plan in ranked:
            if len(kept) < top and kind(plan.candidate) not in seen:
                seen.add(kind(plan.candidate))
                kept.append(plan)
    kept.sort(key=ranked.index)
    runnable = next((plan for plan in ranked if not plan.not_runnable), None)
    return kept if runnable is None or runnable in kept else [*kept, runnable]


def _rank(plan: Planned) -> tuple[float, int, bool, float]:
    """What comes first: the faster; of those equal to six digits the simpler pipeline, then what needs less memory.

    Where processes share cores a bubble costs nothing, and many schedules are predicted alike.
    """
    candidate = plan.candidate
    seconds = float(f"{plan.step_seconds:.5e}")
    return seconds, candidate.virtual_stages, candidate.schedule != "1f1b", plan.estimate.memory_bytes


def _spread(candidate: Candidate) -> Hashable:
    return candidate.pp, candidate.dp * candidate.cp, candidate.tp, candidate.ep


def _degrees(candidate: Candidate) -> Hashable:
    return tuple(getattr(candidate, name) for name in _DEGREES)


def _manner(candidate: Candidate) -> Hashable:
    names = ("micro_batch_size", "schedule", "virtual_stages", "sequence_parallel", "tp_whole", "level", "zero")
    return _degrees(candidate), tuple(getattr(candidate, name) for name in names)
