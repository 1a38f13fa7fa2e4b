"""Why nothing fits, and the cheapest changes under which something would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from shardwise.errors import ConfigError, PlanError
from shardwise.planner.adapters import Lora, adapted, adapter_parameters
from shardwise.planner.job import USABLE_MEMORY, Candidate, Job, without
from shardwise.planner.refine import refine
from shardwise.planner.space import divisors, enumerate_space
from shardwise.planner.sweep import Sweep, candidate_of
from shardwise.units import format_bytes

NOTHING_LEGAL = "no split is legal"  # how the rule of such a refusal begins
_GROWTH = (2, 4, 8, 16, 32, 64)  # of the devices
_LEAST_TOKENS = 128  # of a row, below which none is proposed
_MOST_LESS = 64  # of the rows of a step
_TRIED = 8  # candidates of a changed job, those with the least need


def no_plan(job: Job, sweep: Sweep) -> PlanError:
    """The least need of any candidate, and changes under which one fits."""
    given = ", ".join(f"{name} = {value}" for name, value in job.fixed.items())
    value = f"{job.costs.name} on {job.devices} {job.cluster.name}" + (f" with {given}" if given else "")
    need = sweep.need if sweep.need > job.limit_bytes else sweep.refused_need
    if not np.isfinite(need):
        reasons = sweep.rejected.values()
        rules = "; ".join(f"{one.rule}: {one.detail}" if one.detail else one.rule for one in reasons)
        return PlanError(value, f"{NOTHING_LEGAL} ({rules})", _freed(job))
    has = format_bytes(job.limit_bytes)
    rule = f"the smallest need of any split is {format_bytes(need)} a device, and {has} of it can be filled"
    if job.cluster.device_type == "cpu":  # more processes share the same memory
        more = [f"Or free memory of the machine: {format_bytes(need / USABLE_MEMORY * job.devices)} in all"]
    else:
        more = [_more_devices(job), f"Or take devices of {format_bytes(need / USABLE_MEMORY)}"]
    changes = (_freed(job), _smaller(job), _adapters(job), *more)
    return PlanError(value, rule, ". ".join(change for change in changes if change))


def _freed(job: Job) -> str:
    """A given field that is in the way, with a value of it that fits."""
    for name, value in job.fixed.items():
        found = fitting(without(job, name))
        if found is not None:
            fields = found.fields() | {"dp": found.dp}
            other = f", for example with {name} = {fields[name]}" if name in fields else ""
            return f"It fits without {name} = {value}{other}"
    if len(job.fixed) > 1 and fitting(replace(job, fixed={})) is not None:
        return "It fits with nothing given"
    return ""


def _smaller(job: Job) -> str:
    """Less work a step: fewer rows, else shorter ones."""
    rows = [number for number in divisors(job.rows)[::-1] if job.rows // _MOST_LESS <= number <= job.rows // 2]
    found = _first(replace(job, rows=number) for number in rows)
    if found is not None:
        return f"It fits with train.global_batch_size={found.rows}"
    found = _first(replace(job, work=replace(job.work, sequence=tokens)) for tokens in _halves(job.work.sequence))
    return "" if found is None else f"It fits with data.max_length={found.work.sequence}"


def _adapters(job: Job) -> str:
    """Nothing trained but adapters, where the whole model was to be."""
    if adapter_parameters(job.costs) is not None:
        return ""
    try:
        fits = fitting(replace(job, costs=adapted(job.costs, Lora()))) is not None
    except ConfigError:  # no layer could have one
        return ""
    return "It fits with adapters in place of all weights: use_lora=true" if fits else ""


def _halves(tokens: int) -> Iterator[int]:
    while tokens % 2 == 0 and tokens // 2 >= _LEAST_TOKENS:
        tokens //= 2
        yield tokens


def _more_devices(job: Job) -> str:
    found = _first(replace(job, devices=job.devices * factor) for factor in _GROWTH)
    return "" if found is None else f"It fits on {found.devices} devices"


def _first(jobs: Iterable[Job]) -> Job | None:
    """The first of jobs, each easier than the one before, that something fits; None if nothing fits the last."""
    order = list(jobs)
    if not order or fitting(order[-1]) is None:
        return None
    return next(job for job in order if fitting(job) is not None)


def fitting(job: Job) -> Candidate | None:
    """A candidate that fits, of those with the least need; None if none does.

    It uses more than half of the devices, all of them where the job does.
    """
    least = job.devices - 1 if job.all_devices else job.devices // 2
    try:
        sweep = Sweep(job, only_runnable=False)
        sweep.run(enumerate_space(job, least, job.devices))
    except PlanError:
        return None
    columns = sweep.pool.columns
    for index in np.argsort(columns["need"])[:_TRIED]:
        plan, _ = refine(job, candidate_of(job, columns, int(index)))
        if plan is not None:
            return plan.candidate
    return None
