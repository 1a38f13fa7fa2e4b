"""Training without a strategy: missing fields are planned, for a named cluster or for this machine's cores."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, PlanError, ShardwiseError
from shardwise.front.measuring import AUTO, measured_cluster, memory_share
from shardwise.front.planning import (
    device_type,
    find_cluster,
    fixed_fields,
    folder_costs,
    manner_of,
    refuse_accumulation,
    trained,
    work_of,
)
from shardwise.front.row_length import row_length
from shardwise.log import say
from shardwise.planner.explain import describe, why
from shardwise.planner.host import on_cluster
from shardwise.planner.job import Found, Job
from shardwise.planner.refusal import NOTHING_LEGAL
from shardwise.planner.search import search
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.filled import PLANNED, filled_keys
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import DeviceType
from shardwise.spec.run import RunConfig, StrategyConfig
from shardwise.spec.strategy import DEFAULT_GLOBAL_BATCH_SIZE
from shardwise.units import format_bytes


@dataclass(frozen=True)
class PlannedRun:
    """A run whose strategy is given, and what the planner expects of it; None where nothing was planned."""

    run: RunConfig
    predicted: dict[str, float] | None = None


def with_planned(run: RunConfig, model: ModelSpec, folder: Path, device: DeviceType, local_devices: int) -> PlannedRun:
    """The run with its whole strategy given: its own fields stay, the others are those of the fastest plan that fits.

    A run whose cluster is ``auto`` or not named uses all of its processes, and its machine is measured where it has
    not been. A run that names none comes back as it is where no split is legal, for the rule of missing degrees to say
    why, and where the machine cannot be measured or the model not be traced; so does one that gives its plan as a file.

    Raises:
        ConfigError: the profile is of devices of another type.
        PlanError: nothing fits.
        LaunchError: this machine could not be measured, and the run asks for that by ``cluster: auto``.
    """
    if run.strategy.plan is not None:
        return PlannedRun(run)
    devices = run.devices or local_devices
    if run.cluster == AUTO:
        refuse_accumulation(run)
        if device != "cpu" or run.nnodes > 1:
            say("cluster = auto: only CPU processes of one machine are measured; missing degrees are data parallel")
            return PlannedRun(run)
    try:
        cluster = measured_cluster(devices, os.environ) if _is_here(run) else _named_cluster(run, device)
        job = _job(run, model, folder, cluster, devices)
    except ShardwiseError as error:
        if run.cluster is not None:
            raise
        say(f"not planned ({error}); missing degrees are data parallel")
        return PlannedRun(run)
    try:
        found = search(job, top=2, only_runnable=True)
    except PlanError as error:
        if run.cluster is not None or not error.rule.startswith(NOTHING_LEGAL):
            raise
        return PlannedRun(run)
    return _with_first(run, job, found)


def _is_here(run: RunConfig) -> bool:
    """Whether the cluster is this machine's CPU."""
    return run.cluster in (None, AUTO)


def _named_cluster(run: RunConfig, device: DeviceType) -> ClusterSpec:
    assert run.cluster is not None
    cluster = find_cluster(run.cluster)
    if device_type(cluster) != device:
        rule = f"is a profile of {device_type(cluster)} devices, and the run is on {device}"
        remedy = f"Give a profile of {device} devices, or leave it out"
        raise ConfigError(f"cluster = {run.cluster!r}", rule, remedy)
    refuse_accumulation(run)
    return cluster


def _job(run: RunConfig, model: ModelSpec, folder: Path, cluster: ClusterSpec, devices: int) -> Job:
    train, here = run.train, _is_here(run)
    costs = trained(run, folder_costs(folder, model, os.environ, manner_of(run)))
    precision = train.precision or ("fp32" if cluster.device_type == "cpu" else "bf16")
    length = row_length(run, model.max_position_embeddings)
    work = on_cluster(work_of(length.tokens, precision, train), cluster)
    work = replace(work, packed=run.data.packing)
    rows = train.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    if here and train.global_batch_size is None:  # as the rule for missing degrees has it: every data rank gets a row
        rows = -(-rows // devices) * devices
    memory = memory_share(devices) if cluster.device_type == "cpu" else 0.0
    return Job(
        model,
        costs,
        cluster,
        devices,
        rows,
        work,
        fixed_fields(run),
        memory,
        halves=not train.compile,
        all_devices=here,
        sequence_from=length.source,
    )


def _with_first(run: RunConfig, job: Job, found: Found) -> PlannedRun:
    """The run as the first plan has it, which is told with its reasons."""
    first = found.plans[0]
    say(f"planned: {describe(first.candidate)} on {first.candidate.devices} devices ({job.cluster.name})")
    memory = format_bytes(first.estimate.memory_bytes)
    rows = f"rows of {job.work.sequence} tokens ({job.sequence_from})"
    say(f"predicted: {first.step_seconds:.3g} s a step of {rows}, {memory} a device")
    for sentence in why(job, found):
        say(f"why: {sentence}")
    buckets = run.strategy.gradient_aggregation_group
    strategy = StrategyConfig(**first.candidate.fields(), gradient_aggregation_group=buckets)
    update: dict[str, Any] = {"strategy": strategy, "devices": first.candidate.devices}
    if _is_here(run):
        update["train"] = run.train.model_copy(update={"global_batch_size": job.rows})
    planned = run.model_copy(update=update)
    noted = [key for key in PLANNED if key.removeprefix("strategy.") not in job.fixed]
    filled = planned.model_copy(update={"filled": (*filled_keys(run, planned), *noted)})
    return PlannedRun(filled, {"step_seconds": first.step_seconds, "memory_bytes": first.estimate.memory_bytes})
