"""From a configuration to what runs: every refusal that needs no torch is made here.

Reads the run, the model's ``config.json``, the devices of this machine and the folders named, and
loads neither torch nor transformers, so that a wrong configuration is answered at once.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.front.compiler import check_compiler
from shardwise.front.describing import model_of
from shardwise.front.hub import locate_model, locate_rows
from shardwise.launch.devices import OVERRIDE, devices_here
from shardwise.launch.nodes import local_processes, nodes_of
from shardwise.launch.output import check_output
from shardwise.log import say
from shardwise.spec.aliases import translate
from shardwise.spec.data_files import data_folder, named_paths
from shardwise.spec.filled import filled_keys
from shardwise.spec.given_plan import with_given_plan
from shardwise.spec.keys import get
from shardwise.spec.model import ModelSpec, check_weights
from shardwise.spec.paths import check_path, local_path
from shardwise.spec.plan import DeviceType, Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import LoraConfig, RunConfig, Sources, data_paths, data_sources, tracker_names
from shardwise.spec.strategy import Strategy, resolve
from shardwise.spec.template import template_text
from shardwise.train.identity import check_resume
from shardwise.train.previous import checkpoints_now

_MAX_LOCAL = 4096  # processes of one machine
_DEFAULT_EPOCHS = 3
_PATH_KEYS = ("model", "tokenizer", "models_dir", "resume", "output_dir", "strategy.plan")


def prepare(
    tree: dict[str, Any],
    *,
    command: str = "train",
    in_memory: Collection[str] = (),
    searches: bool = True,
    own_output: bool = False,
) -> tuple[RunConfig, Plan]:
    """The resolved run and its plan; ``command`` other than ``train`` needs no data and no output folder.

    ``in_memory`` are names in ``data.train`` and ``data.eval`` that stand for no files. Without ``searches`` missing
    degrees are data parallel, also where a run would plan them: for a look at what no plan changes. With ``own_output``
    what lies in the output folder is this run's, which is at work in it.

    The environment's SHARDWISE_DEVICE wins over ``device``; SHARDWISE_MODELS_DIR stands in for a
    missing ``models_dir``. In the run that comes back every default is filled in and ``model`` is the
    folder that was found, so that it can be dumped, read and resolved again to the same.

    Raises:
        ConfigError, PlanError: what cannot run, before any weight or library is loaded.
    """
    tree, notes = translate(tree)
    run = parse_run(tree)
    _check_paths(run)
    nodes = nodes_of(run.nnodes, run.node_rank, run.rdzv_endpoint)
    is_check = command == "check"  # it reads no weights, and runs on the CPU
    folder = locate_model(run.model, run.models_dir or os.environ.get("SHARDWISE_MODELS_DIR"), only_config=is_check)
    model = model_of(folder, os.environ)
    if run.model_init == "pretrained" and (model.has_weights or not is_check):
        check_weights(folder, model)
    device, local = devices_here(os.environ.get("SHARDWISE_DEVICE") or run.device, may_be_absent=is_check)
    run = locate_tokenizer(run)
    if command == "train":
        run = locate_data(run, in_memory)
        check_data(run, in_memory)
        if not own_output:
            check_output(run, folder, nodes)
    if command in ("train", "script"):
        check_trackers(run)
    run, table = with_given_plan(run, model)
    run, predicted = _planned(run, model, folder, device, local * nodes.count) if searches else (run, None)
    strategy, rows = resolve(run, model, local * nodes.count)
    if run.train.compile and not is_check:
        check_compiler(device)
    per_machine = local_processes(strategy.world_size, nodes)
    if per_machine > _MAX_LOCAL and command not in ("plan", "check"):
        rule = f"is {per_machine} processes on one machine, and {_MAX_LOCAL} is the most"
        raise ConfigError(f"devices = {strategy.world_size}", rule, "Use smaller degrees, or more machines (nnodes)")
    if per_machine > local and device != "cpu" and not is_check:
        rule = f"this machine has {local} {device} device{'s' if local > 1 else ''}"
        raise ConfigError(f"devices = {strategy.world_size}", rule, f"Use devices={local * nodes.count}; {OVERRIDE}")
    filled, plan = (
        _filled(run, folder, device, strategy, rows),
        Plan(model, strategy, rows, device, table, predicted=predicted),
    )
    if command == "train" and not nodes.rank:
        check_resume(filled, plan, checkpoints_now(local_path(run.output_dir)))
    for note in notes:
        say(note)
    return filled, plan


def _check_paths(run: RunConfig) -> None:
    for key, name in [*((key, get(run, key)) for key in _PATH_KEYS), *data_paths(run)]:
        check_path(key, name)


def _planned(
    run: RunConfig, model: ModelSpec, folder: Path, device: DeviceType, local_devices: int
) -> tuple[RunConfig, dict[str, float] | None]:
    """The run with the best plan's strategy where it is to be planned, and what the planner expects of that.

    The planner is loaded for such a run only.
    """
    if run.cluster is None and not planned_by_itself(run, device):
        return run, None
    from shardwise.front.automatic import with_planned

    planned = with_planned(run, model, folder, device, local_devices)
    return planned.run, planned.predicted


def planned_by_itself(run: RunConfig, device: DeviceType) -> bool:
    """Whether a run that names no cluster is planned: several processes of this CPU, and nothing of a strategy given.

    A batch given as accumulation steps would depend on the plan: such a run keeps the rule for missing degrees.
    """
    names = run.strategy.model_fields_set - {"gradient_aggregation_group"}
    given = any(getattr(run.strategy, name) is not None for name in names)
    here = device == "cpu" and run.nnodes == 1 and (run.devices or 1) > 1
    return here and not given and run.train.gradient_accumulation_steps is None


def locate_tokenizer(run: RunConfig) -> RunConfig:
    """The run with the folder of its ``tokenizer``, looked for as a model is; a template file is looked for too.

    Raises:
        ConfigError: one of them is not there.
    """
    if run.chat_template is not None:
        template_text(run.chat_template)
    if run.tokenizer is None:
        return run
    models_dir = run.models_dir or os.environ.get("SHARDWISE_MODELS_DIR")
    try:
        folder = locate_model(run.tokenizer, models_dir, only_config=True)
    except ConfigError as error:
        rule = error.rule.replace("no such model folder", "no such folder")
        raise ConfigError(f"tokenizer = {run.tokenizer!r}", rule, error.remedy) from None
    return run.model_copy(update={"tokenizer": str(folder)})


def locate_data(run: RunConfig, in_memory: Collection[str] = ()) -> RunConfig:
    """The run with the paths of its rows, also of those that it names as a data set of a hub.

    Raises:
        ConfigError: a data set that is found nowhere.
    """
    models_dir, cache = run.models_dir or os.environ.get("SHARDWISE_MODELS_DIR"), data_folder(os.environ)

    def found(key: str, given: Sources) -> Sources:
        paths = {
            source.path: source.path if source.path in in_memory else locate_rows(key, source.path, models_dir, cache)
            for source in data_sources(given)
        }
        if not isinstance(given, tuple):
            return given if given is None else paths[given]
        return tuple(source.model_copy(update={"path": paths[source.path]}) for source in given)

    places = {name: found(f"data.{name}", getattr(run.data, name)) for name in ("train", "eval")}
    return run.model_copy(update={"data": run.data.model_copy(update=places)})


def check_data(run: RunConfig, in_memory: Collection[str] = ()) -> None:
    """Refuse data files and folders that are not there.

    Raises:
        ConfigError: no ``data.train``, or a path at which nothing lies.
    """
    if run.data.train is None:
        raise ConfigError("data.train", "missing: there is nothing to train on", "Give data.train=FILE.jsonl")
    for key, name in data_paths(run):
        if name in in_memory or local_path(name).exists() or named_paths(local_path(name)):
            continue
        rule = f"no such file (in {Path(name).absolute().parent})"
        raise ConfigError(f"{key} = {name!r}", rule, f"Give {key}=FILE.jsonl; paths count from the working directory")


def check_trackers(run: RunConfig) -> None:
    """Refuse trackers whose package is not installed; it is looked for, not imported.

    Raises:
        ConfigError: the package is absent, with the command that installs it.
    """
    for name in tracker_names(run):
        if importlib.util.find_spec(name) is None:
            value = f"log.report_to = {name!r}"
            raise ConfigError(value, f"the package {name} is not installed", f"Install it: pip install {name}")


def _filled(run: RunConfig, folder: Path, device: DeviceType, strategy: Strategy, rows: int) -> RunConfig:
    """The run with every default filled in, and a note of which ones these are."""
    train, given = run.train, run.strategy
    lora = run.lora or (LoraConfig() if run.use_lora else None)
    epochs = train.epochs or (None if train.max_steps else _DEFAULT_EPOCHS)
    filled = run.model_copy(
        update={
            "model": str(folder),
            "device": device,
            "devices": strategy.world_size,
            "lora": lora,
            "use_lora": lora is not None,
            "data": run.data.model_copy(update={"seed": train.seed if run.data.seed is None else run.data.seed}),
            "train": train.model_copy(
                update={
                    "global_batch_size": rows,
                    "gradient_accumulation_steps": None,
                    "epochs": epochs,
                    "precision": train.precision or ("fp32" if device == "cpu" else "bf16"),
                }
            ),
            "strategy": given.model_copy(
                update={
                    "pp": strategy.pp,
                    "tp": strategy.tp,
                    "dp_replicate": strategy.dp_replicate,
                    "dp_shard": strategy.dp_shard,
                    "reshard": strategy.reshard,
                    "micro_batch_size": strategy.micro_batch_size,
                    "virtual_stages": strategy.virtual_stages,
                    "stages": strategy.stages,
                }
            ),
        }
    )
    return filled.model_copy(update={"filled": filled_keys(run, filled)})
