"""The search: all legal candidates are judged at once, the best of them stage by stage; the fastest that fit remain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwise.errors import PlanError
from shardwise.planner.job import Found, Job, Planned, without
from shardwise.planner.refine import refine
from shardwise.planner.screen import least_device_seconds
from shardwise.planner.space import Columns, enumerate_space
from shardwise.planner.sweep import REFINED, Sweep, candidate_of, not_runnable
from shardwise.units import format_bytes

NOTHING_LEGAL = "no split is legal"
_MOST_REFINED = 160
_NEAR = 1.02  # and further ones whose guess is as near to the best as this
_GROWTH = (2, 4, 8, 16, 32, 64)


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
        if not most or job.all_devices or (not plans and most < job.devices // 4):
            break
        if plans:
            per_row = least_device_seconds(job, _cells(space.columns)) if per_row is None else per_row
            if len(space) and job.rows * per_row / most >= plans[0].step_seconds:
                break
    if not plans:
        raise _no_plan(job, sweep)
    rejected = tuple(sweep.rejected.values())
    bound = min(bound, plans[0].step_seconds)
    return Found(tuple(plans), rejected, sweep.considered, refined, bound, tuple(sweep.points))


def _cells(columns: Columns) -> Columns:
    """``tp cp ep m`` of a space in every combination: fewer devices allow for no other numbers of them."""
    axes = [np.unique(columns[name]) for name in ("tp", "cp", "ep", "m")]
    grids = np.meshgrid(*axes, indexing="ij")
    return {name: grid.ravel() for name, grid in zip(("tp", "cp", "ep", "m"), grids, strict=True)}


def _refine_best(job: Job, sweep: Sweep, top: int) -> tuple[list[Planned], int, float]:
    """Plans made of the candidates with the best guesses, how many were looked at, and a bound on all others."""
    columns = sweep.pool.columns
    done: set[int] = set()
    plans: list[Planned] = []
    for some in (np.arange(len(sweep.pool)), np.flatnonzero(sweep.runnable(columns))):
        order = some[np.argsort(columns["seconds"][some], kind="stable")]
        own: list[Planned] = []
        for looked_at, index in enumerate(order.tolist()):
            guess = float(columns["seconds"][index])
            near = not own or guess < _NEAR * min(plan.step_seconds for plan in own)
            if (looked_at >= REFINED and len(own) >= min(top, REFINED) and not near) or looked_at >= _MOST_REFINED:
                break
            if index in done:
                continue
            done.add(index)
            plan, need = refine(job, candidate_of(job, columns, index))
            if plan is not None:
                own.append(replace(plan, not_runnable=not_runnable(plan.candidate, job.work.precision)))
            else:
                sweep.refused_need = min(sweep.refused_need, need)
        plans += own
    left = np.ones(len(sweep.pool), dtype=bool)
    left[list(done)] = False
    bound = min(float(columns["bound"][left].min(initial=np.inf)), sweep.bound)
    sweep.forget()
    return plans, len(done), bound


def _best(plans: list[Planned], top: int) -> list[Planned]:
    """The ``top`` fastest, and the fastest that can be trained with."""
    unique = {plan.candidate: plan for plan in plans}
    ranked = sorted(unique.values(), key=lambda plan: (plan.step_seconds, plan.estimate.memory_bytes))
    kept = ranked[:top]
    runnable = next((plan for plan in ranked if not plan.not_runnable), None)
    return kept if runnable is None or runnable in kept else [*kept, runnable]


def _no_plan(job: Job, sweep: Sweep) -> PlanError:
    """The least need of any candidate, and the cheapest change under which one fits."""
    given = ", ".join(f"{name} = {value}" for name, value in job.fixed.items())
    value = f"{job.costs.name} on {job.devices} {job.cluster.name}" + (f" with {given}" if given else "")
    need = sweep.need if sweep.need > job.limit_bytes else sweep.refused_need
    if not np.isfinite(need):
        reasons = sweep.rejected.values()
        rules = "; ".join(f"{one.rule}: {one.detail}" if one.detail else one.rule for one in reasons)
        rule = f"{NOTHING_LEGAL} ({rules})"
    else:
        has = format_bytes(job.limit_bytes)
        rule = f"the smallest need of any split is {format_bytes(need)} a device, and {has} of it can be filled"
    return PlanError(value, rule, _cheapest_change(job, need))


def _cheapest_change(job: Job, need: float) -> str:
    for name in job.fixed:
        if _fits_somewhere(without(job, name)):
            return f"It fits without {name} = {job.fixed[name]}"
    for factor in _GROWTH:
        if _fits_somewhere(replace(job, devices=job.devices * factor)):
            return f"It fits on {job.devices * factor} devices"
    free = replace(job, fixed={})
    if job.fixed and _fits_somewhere(free):
        return "It fits with nothing given"
    return "" if not np.isfinite(need) else "Use devices with more memory, or shorter rows (data.max_length)"


def _fits_somewhere(job: Job) -> bool:
    try:
        sweep = Sweep(job, only_runnable=False)
        sweep.run(enumerate_space(job, job.devices // 2, job.devices))
    except PlanError:
        return False
    columns = sweep.pool.columns
    order = np.argsort(columns["need"])[:8]
    return any(refine(job, candidate_of(job, columns, int(index)))[0] is not None for index in order)
