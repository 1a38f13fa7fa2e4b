"""The search: all legal candidates are judged at once, the best of them stage by stage; the fastest that fit remain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from shardwise.errors import ConfigError, PlanError
from shardwise.planner.job import Candidate, Found, Job, Planned, Rejection, without
from shardwise.planner.refine import refine
from shardwise.planner.screen import Screened, least_device_seconds, screen
from shardwise.planner.space import Columns, Space, enumerate_space
from shardwise.spec.block import RECOMPUTE_LEVELS
from shardwise.spec.rules import parse_run
from shardwise.units import format_bytes

_REFINED = 32  # candidates that are looked at stage by stage, at least
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
    rejected: dict[tuple[str, str], Rejection] = {}
    considered = refined = 0
    bound, need = float("inf"), float("inf")
    most = job.devices
    per_row: float | None = None
    while most >= 1:
        space = enumerate_space(job, most // 2, most)
        screened = _runnable(screen(job, space)) if only_runnable else screen(job, space)
        fits = screened.columns["need"] <= job.limit_bytes
        _count_memory(space, screened, fits, job)
        _merge(rejected, space)
        considered += len(screened)
        need = min(need, float(screened.columns["need"].min(initial=np.inf)))
        found, looked_at, least = _refine_best(job, screened.where(fits), top)
        plans, refined = _best(plans + found, top), refined + looked_at
        bound = min(bound, least)
        most //= 2
        if not most or (not plans and most < job.devices // 4):
            break
        if plans:
            per_row = least_device_seconds(job, _cells(space.columns)) if per_row is None else per_row
            if len(space) and job.rows * per_row / most >= plans[0].step_seconds:
                break
    if not plans:
        raise _no_plan(job, rejected, need, only_runnable)
    return Found(tuple(plans), tuple(rejected.values()), considered, refined, min(bound, plans[0].step_seconds))


@cache
def unavailable() -> dict[str, str]:
    """Parts of a plan that the runtime has not yet, by the rules that training itself refuses them by."""
    probes: dict[str, dict[str, Any]] = {"cp": {"cp": 2}, "ep": {"ep": 2}, "selective": {"recompute": "selective"}}
    missing = {}
    for name, strategy in probes.items():
        try:
            parse_run({"model": "any", "strategy": strategy})
        except ConfigError as error:
            missing[name] = f"{error.value}: {error.rule}"
    return missing


def not_runnable(candidate: Candidate) -> str:
    """Which part of a candidate the runtime has not yet; empty if it can be trained with."""
    used = {"cp": candidate.cp > 1, "ep": candidate.ep > 1, "selective": candidate.level == "selective"}
    parts = [name for name in unavailable() if used[name]]
    words = {"cp": f"cp {candidate.cp}", "ep": f"ep {candidate.ep}", "selective": "recompute selective"}
    return ", ".join(words[name] for name in parts)


def _runnable(screened: Screened) -> Screened:
    columns, missing = screened.columns, unavailable()
    mask = np.ones(len(screened), dtype=bool)
    for name in ("cp", "ep"):
        if name in missing:
            mask &= columns[name] == 1
    if "selective" in missing:
        mask &= columns["level"] != RECOMPUTE_LEVELS.index("selective")
    return screened.where(mask)


def _cells(columns: Columns) -> Columns:
    """``tp cp ep m`` of a space in every combination: fewer devices allow for no other numbers of them."""
    axes = [np.unique(columns[name]) for name in ("tp", "cp", "ep", "m")]
    grids = np.meshgrid(*axes, indexing="ij")
    return {name: grid.ravel() for name, grid in zip(("tp", "cp", "ep", "m"), grids, strict=True)}


def _refine_best(job: Job, screened: Screened, top: int) -> tuple[list[Planned], int, float]:
    """Plans made of the candidates with the best guesses, how many were looked at, and a bound on all others."""
    done: set[int] = set()
    plans: list[Planned] = []
    for some in (np.arange(len(screened)), np.flatnonzero(_runnable_mask(screened))):
        order = some[np.argsort(screened.columns["seconds"][some], kind="stable")]
        own: list[Planned] = []
        looked_at = 0
        for index in _in_order(order):
            guess = float(screened.columns["seconds"][index])
            near = not own or guess < _NEAR * min(plan.step_seconds for plan in own)
            if (looked_at >= _REFINED and len(own) >= top and not near) or looked_at >= _MOST_REFINED:
                break
            looked_at += 1
            if index in done:
                continue
            done.add(index)
            candidate = _candidate(job, screened.columns, index)
            plan, _ = refine(job, candidate)
            if plan is not None:
                own.append(replace(plan, not_runnable=not_runnable(plan.candidate)))
        plans += own
    left = np.ones(len(screened), dtype=bool)
    left[list(done)] = False
    return plans, len(done), float(screened.columns["bound"][left].min(initial=np.inf))


def _in_order(order: np.ndarray) -> Iterator[int]:
    yield from (int(index) for index in order)


def _runnable_mask(screened: Screened) -> np.ndarray:
    numbered = Screened({**screened.columns, "index": np.arange(len(screened))})
    mask = np.zeros(len(screened), dtype=bool)
    mask[_runnable(numbered).columns["index"]] = True
    return mask


def _candidate(job: Job, columns: Columns, index: int) -> Candidate:
    row = {name: column[index].item() for name, column in columns.items()}
    shard = int(row["shard"])
    virtual = int(row["v"])
    given = job.fixed.get("schedule")
    return Candidate(
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        dp_replicate=int(row["dp"]) // shard,
        dp_shard=shard,
        cp=int(row["cp"]),
        ep=int(row["ep"]),
        reshard=bool(row["reshard"]),
        sequence_parallel=bool(row["sp"]),
        micro_batch_size=int(row["m"]),
        schedule="interleaved" if virtual > 1 else given or "1f1b",
        virtual_stages=virtual,
        level=RECOMPUTE_LEVELS[int(row["level"])],
    )


def _best(plans: list[Planned], top: int) -> list[Planned]:
    """The ``top`` fastest, and the fastest that can be trained with."""
    unique = {plan.candidate: plan for plan in plans}
    ranked = sorted(unique.values(), key=lambda plan: (plan.step_seconds, plan.estimate.memory_bytes))
    kept = ranked[:top]
    runnable = next((plan for plan in ranked if not plan.not_runnable), None)
    return kept if runnable is None or runnable in kept else [*kept, runnable]


def _count_memory(space: Space, screened: Screened, fits: np.ndarray, job: Job) -> None:
    out = np.flatnonzero(~fits)
    if len(out):
        least = out[np.argmin(screened.columns["need"][out])]
        example = _candidate(job, screened.columns, int(least)).fields()
        detail = f"above {format_bytes(job.limit_bytes)} of a device; the nearest needs "
        detail += format_bytes(float(screened.columns["need"][least]))
        space.reject("memory", detail, len(out), example)


def _merge(rejected: dict[tuple[str, str], Rejection], space: Space) -> None:
    for key, one in space.rejected.items():
        known = rejected.get(key)
        rejected[key] = replace(one, number=one.number + (known.number if known else 0))


def _no_plan(job: Job, rejected: dict[tuple[str, str], Rejection], need: float, only_runnable: bool) -> PlanError:
    """The least need of any candidate, and the cheapest change under which one fits."""
    given = ", ".join(f"{name} = {value}" for name, value in job.fixed.items())
    value = f"{job.costs.name} on {job.devices} {job.cluster.name}" + (f" with {given}" if given else "")
    if not np.isfinite(need):
        rules = "; ".join(f"{one.rule}: {one.detail}" if one.detail else one.rule for one in rejected.values())
        rule = f"no split is legal ({rules})"
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
        space = enumerate_space(job, job.devices // 2, job.devices)
    except PlanError:
        return False
    screened = screen(job, space)
    good = screened.where(screened.columns["need"] <= job.limit_bytes)
    order = np.argsort(good.columns["need"])[:8]
    return any(refine(job, _candidate(job, good.columns, int(index)))[0] is not None for index in order)
