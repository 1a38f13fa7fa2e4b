"""From the words of a command or a run to a job for the planner, and from its answer to ``plan.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.config import nearest
from shardwise.errors import ConfigError, PlanError
from shardwise.files import replace_text
from shardwise.front.describing import costs_of, model_of
from shardwise.front.hub import locate_model
from shardwise.front.measuring import AUTO, measured_cluster, memory_share
from shardwise.front.row_length import row_length
from shardwise.planner.adapters import ALL_LINEAR, Lora, adapted
from shardwise.planner.host import on_cluster
from shardwise.planner.job import Found, Job
from shardwise.planner.known import known_costs, known_models, known_within, with_degrees
from shardwise.planner.layout import Work
from shardwise.spec.aliases import translate
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import ClusterSpec, load_cluster
from shardwise.spec.described import FIRST_MANNER, Manner
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import DeviceType, Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import LoraConfig, RunConfig, TrainConfig

_STEP_TOKENS = 4 * 2**20  # of an optimizer step, where no batch is given
_LEAST_ROWS = 8
_FREE = ("gradient_aggregation_group", "plan")  # fields of a strategy that no degree depends on


def make_job(tree: dict[str, Any], environ: Mapping[str, str], memory: str | None = None) -> Job:
    """The job that a command describes; every field of ``strategy`` that it gives is fixed.

    Args:
        memory: of a device where it is not the profile's, such as ``40GiB``.

    Raises:
        ConfigError: an unknown key or profile, no model, no number of devices.
    """
    run = parse_run(translate(tree)[0], planned=True)
    if run.cluster is None:
        raise ConfigError(
            "--cluster", "missing: a plan is for devices of a kind", "Give --cluster NAME, such as a100-80gb"
        )
    if run.devices is None:
        raise ConfigError("--devices", "missing: a plan is for a number of devices", "Give --devices 8")
    refuse_accumulation(run)
    model, costs = _described(run, environ)
    here = run.cluster == AUTO
    cluster = measured_cluster(run.devices, environ) if here else find_cluster(run.cluster)
    length = row_length(run, model.max_position_embeddings)
    sequence = length.tokens
    work = on_cluster(work_of(sequence, run.train.precision or default_precision(cluster), run.train), cluster)
    work = replace(work, packed=run.data.packing)
    rows = run.train.global_batch_size or max(_LEAST_ROWS, _STEP_TOKENS // sequence)
    own = memory_share(run.devices) if here else 0.0
    limit = own if memory is None else parse_bytes("--memory", memory)
    costs, fixed = trained(run, costs), fixed_fields(run)
    halves = not run.train.compile
    told = length.source
    return Job(model, costs, cluster, run.devices, rows, work, fixed, limit, halves, sequence_from=told)


def _described(run: RunConfig, environ: Mapping[str, str]) -> tuple[ModelSpec, ModelCosts]:
    """Sizes and costs of a well-known model, or of the one in a folder."""
    known = known_models()
    if run.model in known:
        if run.attn_implementation == "eager":
            rule = f"the costs of the well-known {run.model} are those of sdpa"
            raise ConfigError("attn_implementation = 'eager'", rule, "Leave it out, or give a folder with config.json")
        known_model, costs = known_costs(run.model)
        share = run.strategy.tp_whole
        return known_model, costs if share is None else known_within(run.model, costs, share)
    try:
        models_dir = run.models_dir or environ.get("SHARDWISE_MODELS_DIR")
        folder = locate_model(run.model, models_dir, only_config=True)
    except ConfigError as error:
        near = nearest(run.model.lower(), known)
        if near is None or Path(run.model).exists():
            raise
        raise ConfigError(error.value, error.rule, f"Did you mean the well-known {near}?") from None
    model = model_of(folder, environ)
    return model, folder_costs(folder, model, environ, manner_of(run))


def manner_of(run: RunConfig) -> Manner:
    """What of a run the costs of its model depend on; attention other than eager is what a model has that has both."""
    return Manner(run.attn_implementation == "eager", run.strategy.tp_whole)


def folder_costs(
    folder: Path, model: ModelSpec, environ: Mapping[str, str], manner: Manner = FIRST_MANNER
) -> ModelCosts:
    """What the model in a folder costs on our runtime: known from before, or traced in a child.

    Raises:
        ShardwiseError: as :func:`shardwise.front.describing.costs_of`.
    """
    return with_degrees(costs_of(folder, environ, manner), model)


def find_cluster(name: str) -> ClusterSpec:
    """A profile of the package, or one in a JSON file of the same form.

    Raises:
        ConfigError: there is no such profile, or the file is damaged.
    """
    path = Path(name)
    if path.suffix != ".json":
        return load_cluster(name)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise ConfigError(f"cluster = {name!r}", rule, "Give a profile's name or file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cluster = {name!r}", f"is not JSON ({error})", "Give a profile's name or file") from None
    if not isinstance(data, dict):
        raise ConfigError(f"cluster = {name!r}", "holds no profile", "Give a profile's name or file")
    return ClusterSpec.from_json(data)


def refuse_accumulation(run: RunConfig) -> None:
    """Refuse a batch that would depend on the plan that is looked for.

    Raises:
        ConfigError: it is given as accumulation steps.
    """
    steps = run.train.gradient_accumulation_steps
    if steps is not None:
        raise ConfigError(
            f"train.gradient_accumulation_steps = {steps} with cluster = {run.cluster!r}",
            "the batch would depend on the plan that is looked for",
            "Give train.global_batch_size, or leave cluster out",
        )


def fixed_fields(run: RunConfig) -> dict[str, Any]:
    """The fields of ``strategy`` that a run gives; they are not searched."""
    given = {name: getattr(run.strategy, name) for name in sorted(run.strategy.model_fields_set)}
    return {name: value for name, value in given.items() if value is not None and name not in _FREE}


def default_precision(cluster: ClusterSpec) -> str:
    """fp32 on CPUs, else bf16 where the chip has it, else fp16."""
    if device_type(cluster) == "cpu":
        return "fp32"
    return next(name for name in ("bf16", "fp16", "fp32") if name in cluster.chip.peak_flops)


def work_of(sequence: int, precision: str, train: TrainConfig) -> Work:
    """What a token costs in bytes, masters and optimizer state beside weights of the precision of the products."""
    work = Work(sequence, precision, ours=True)
    if precision == "fp32":  # a weight is its own master
        work = replace(work, compute_bytes=4.0, weight_bytes=4.0, sent_weight_bytes=4.0)
        work = replace(work, optimizer_bytes=8.0, traffic_bytes=28.0)
    slots = 2 if train.optimizer == "adamw" else int(train.momentum > 0)
    spared = 4.0 * (2 - slots)  # AdamW's state is counted above; each slot is read and written once a step
    optimizer, traffic = work.optimizer_bytes - spared, work.traffic_bytes - 2 * spared
    return replace(work, optimizer_bytes=optimizer, traffic_bytes=traffic)


def trained(run: RunConfig, costs: ModelCosts) -> ModelCosts:
    """The model with what the run trains of it: with LoRA its adapters, and the modules that train whole.

    Raises:
        ConfigError: a target that is no linear layer of the model.
    """
    if not run.use_lora and run.lora is None:
        return costs
    lora = run.lora or LoraConfig()
    wanted = lora.target_modules
    everything = wanted is None or (isinstance(wanted, str) and wanted.lower() == ALL_LINEAR)
    targets = ALL_LINEAR if everything or wanted is None else wanted
    return adapted(costs, Lora(lora.r, targets, lora.modules_to_save, lora.dropout))


def save_plan(job: Job, found: Found, path: Path) -> str:
    """Write the best plan that can be trained with as ``plan.json``; a line that says what was done.

    Raises:
        ConfigError: the path holds another file, or cannot be written to.
    """
    plan = runnable_plan(job, found)
    if plan is None:
        return f"{path} not written: no plan that fits can be trained with yet"
    check_outputs(path, None)
    try:
        plan.save(path)
    except OSError as error:
        raise _not_writable("--output", path, error) from None
    return f"wrote {path}: {plan.strategy}"


def check_outputs(plan: Path, page: Path | None) -> None:
    """Refuse paths that a plan and its page cannot be written to, before the search.

    Raises:
        ConfigError: both are one file, a path holds another file, or its folder cannot be written to.
    """
    if page is not None and page.resolve() == plan.resolve():
        raise ConfigError(f"--html {page}", "is where the plan is written (--output)", "Name another file")
    for option, path in (("--output", plan), ("--html", page)):
        if path is None:
            continue
        folder = path.parent
        if not folder.is_dir():
            raise ConfigError(f"{option} {path}", "cannot be written to: there is no such folder", "Name another file")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            rule = "is a folder" if path.is_dir() else "cannot be written to (no permission)"
            raise ConfigError(f"{option} {path}", rule, "Name another file")
    if plan.exists():
        try:
            Plan.load(plan)
        except (PlanError, OSError):
            raise ConfigError(f"--output {plan}", "is there, and is no plan", "Name another file") from None


def _not_writable(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path}", f"cannot be written to ({error.strerror})", "Name another file")


def save_profile(cluster: ClusterSpec, path: Path, option: str) -> None:
    """Write a profile that :func:`find_cluster` reads; ``option`` names the path in messages.

    Raises:
        ConfigError: the path does not end in .json, holds another file, or cannot be written to.
    """
    key = f"{option} {path}"
    if path.suffix != ".json":
        raise ConfigError(key, "a profile's file ends in .json", f"Use {path}.json")
    if path.exists():
        try:
            find_cluster(str(path))
        except ConfigError:
            raise ConfigError(key, "is there, and is no profile", "Name another file") from None
    try:
        replace_text(path, json.dumps(cluster.to_json(), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(key, f"cannot be written to ({error.strerror})", "Name another file") from None


def save_page(text: str, path: Path) -> None:
    """Write a page.

    Raises:
        ConfigError: the path cannot be written to.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise _not_writable("--html", path, error) from None


def runnable_plan(job: Job, found: Found) -> Plan | None:
    """The best plan that the runtime can execute, as it reads it; None if none was found."""
    best = next((plan.candidate for plan in found.plans if not plan.not_runnable), None)
    return None if best is None else Plan(job.model, best.strategy(), job.rows, device_type(job.cluster))


def device_type(cluster: ClusterSpec) -> DeviceType:
    """What torch calls the devices of a profile."""
    return cluster.device_type


def parse_bytes(key: str, text: str) -> float:
    """``'1.5GiB'`` -> ``1610612736.0``; ``MB`` and the like are powers of 1000.

    Raises:
        ConfigError: no positive number with a unit; ``key`` names it.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", text, re.IGNORECASE)
    if not found or not float(found[1]):
        raise ConfigError(f"{key} {text}", "must be a size above 0 with its unit", "Write it as 40GiB or 900MB")
    base = 1024 if found[3] else 1000
    return float(found[1]) * float(base ** " KMGT".index(found[2].upper() or " "))
