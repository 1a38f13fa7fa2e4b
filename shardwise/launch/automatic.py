"""Training without a strategy: where the kind of devices is named, missing fields of the strategy are planned."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.launch.planning import (
    device_type,
    find_cluster,
    fixed_fields,
    folder_costs,
    sequence_of,
    trained,
    work_of,
)
from shardwise.log import say
from shardwise.planner.explain import describe, why
from shardwise.planner.job import Job
from shardwise.planner.search import search
from shardwise.spec.filled import PLANNED, filled_keys
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import DeviceType
from shardwise.spec.run import RunConfig, StrategyConfig
from shardwise.spec.strategy import DEFAULT_GLOBAL_BATCH_SIZE
from shardwise.units import format_bytes


def with_planned(run: RunConfig, model: ModelSpec, folder: Path, device: DeviceType, local_devices: int) -> RunConfig:
    """The run with its whole strategy given: its own fields stay, the others are those of the fastest plan that fits.

    A run that gives its plan as a file comes back as it is.

    Raises:
        ConfigError: the profile is of devices of another type.
        PlanError: nothing fits.
    """
    assert run.cluster is not None
    if run.strategy.plan is not None:
        return run
    cluster = find_cluster(run.cluster)
    if device_type(cluster) != device:
        rule = f"is a profile of {device_type(cluster)} devices, and the run is on {device}"
        remedy = f"Give a profile of {device} devices, or leave it out"
        raise ConfigError(f"cluster = {run.cluster!r}", rule, remedy)
    train = run.train
    costs = trained(run, folder_costs(folder, model, os.environ))
    fixed = fixed_fields(run)
    rows = train.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    if train.gradient_accumulation_steps is not None:
        raise ConfigError(
            f"train.gradient_accumulation_steps = {train.gradient_accumulation_steps} with cluster = {run.cluster!r}",
            "the batch would depend on the plan that is looked for",
            "Give train.global_batch_size, or leave cluster out",
        )
    work = work_of(sequence_of(run, model), train.precision or ("fp32" if device == "cpu" else "bf16"), train)
    job = Job(model, costs, cluster, run.devices or local_devices, rows, work, fixed, halves=not run.train.compile)
    found = search(job, top=2, only_runnable=True)
    first = found.plans[0]
    say(f"planned: {describe(first.candidate)} on {first.candidate.devices} devices")
    say(f"predicted: {first.step_seconds:.3g} s a step, {format_bytes(first.estimate.memory_bytes)} a device")
    for sentence in why(job, found):
        say(f"why: {sentence}")
    groups = run.strategy.gradient_aggregation_group
    strategy = StrategyConfig(**first.candidate.fields(), gradient_aggregation_group=groups)
    planned = run.model_copy(update={"strategy": strategy, "devices": first.candidate.devices})
    noted = [key for key in PLANNED if key.removeprefix("strategy.") not in fixed]
    return planned.model_copy(update={"filled": (*filled_keys(run, planned), *noted)})
