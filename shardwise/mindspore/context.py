"""``set_context`` and ``set_auto_parallel_context``: what they set for the Trainer that follows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwise.api.ambient import AMBIENT
from shardwise.api.contact import DEVICE_VARIABLE, device_override, devices_said, rank_here
from shardwise.api.messages import unknown
from shardwise.errors import ConfigError
from shardwise.launch.resolve import choose_device
from shardwise.log import say

GRAPH_MODE = 0
PYNATIVE_MODE = 1
_TARGETS = {"Ascend": "npu", "GPU": "cuda", "CPU": "cpu"}


class ParallelMode:
    """Names of the parallel modes. What a mode leaves open is filled in, and printed with the plan."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST = (STAND_ALONE, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL)


# Arguments without an effect here, and why.
_NO_EFFECT = {
    "device_id": "each process takes the device of its local rank",
    "save_graphs": "there are no graphs to save",
    "save_graphs_path": "there are no graphs to save",
    "max_call_depth": "there are no graphs",
    "enable_graph_kernel": "kernels are those of PyTorch",
    "graph_kernel_flags": "kernels are those of PyTorch",
    "enable_compile_cache": "blocks are not cached between runs",
    "compile_cache_path": "blocks are not cached between runs",
    "jit_config": "there is no jit to configure",
    "jit_level": "there is no jit to configure",
    "jit_syntax_level": "there is no jit to configure",
    "max_device_memory": "PyTorch's allocator takes what is needed",
    "mempool_block_size": "PyTorch's allocator takes what is needed",
    "memory_optimize_level": "strategy.recompute saves memory",
    "memory_offload": "strategy.recompute saves memory",
    "pynative_synchronize": "the operations of PyTorch report where they fail",
    "deterministic": "CPU runs repeat to the bit; on other devices it depends on the operations",
    "ascend_config": "the settings of the device are those of torch-npu",
    "runtime_num_threads": "OMP_NUM_THREADS sets it",
    "inter_op_parallel_num": "OMP_NUM_THREADS sets it",
    "env_config_path": "settings come from run.yaml",
    "print_file_path": "output goes to logs/",
    "check_bprop": "gradients are those of PyTorch's autograd",
    "precompile_only": "nothing is compiled before the first step",
    "op_timeout": "the variable SHARDWISE_TIMEOUT_SECONDS sets it",
}
_PARALLEL_NO_EFFECT = {
    "auto_parallel_search_mode": "what is not given is filled by the rule that the plan prints",
    "search_mode": "what is not given is filled by the rule that the plan prints",
    "parameter_broadcast": "every rank reads its own part of the weights",
    "strategy_ckpt_load_file": "the plan is plan.json in output_dir",
    "strategy_ckpt_save_file": "the plan is plan.json in output_dir",
    "strategy_ckpt_config": "the plan is plan.json in output_dir",
    "full_batch": "rows are handed out by the Trainer",
    "dataset_strategy": "rows are handed out by the Trainer",
    "parallel_optimizer_config": "enable_parallel_optimizer decides alone",
    "enable_alltoall": "the collectives follow from the plan",
    "all_reduce_fusion_config": "gradient_aggregation_group numbers the buckets",
    "comm_fusion": "gradient_aggregation_group numbers the buckets",
    "gradient_fp32_sync": "gradients are summed in the precision of the masters",
    "force_fp32_communication": "gradients are summed in the precision of the masters",
    "loss_repeated_mean": "the loss is the mean over supervised tokens whatever the plan",
    "pipeline_result_broadcast": "the loss reaches every rank anyway",
    "group_ckpt_save_file": "checkpoints load under any plan",
}


class _Values:
    """What a script has said of each argument, and what holds where it has said nothing."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self.defaults = dict(defaults)
        self.said: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        return self.said.get(name, self.defaults.get(name))


_CONTEXT = _Values({"mode": PYNATIVE_MODE, "device_target": None})
_PARALLEL = _Values(
    {
        "parallel_mode": ParallelMode.STAND_ALONE,
        "device_num": None,
        "global_rank": None,
        "pipeline_stages": 1,
        "pipeline_config": None,
        "micro_batch_num": None,
        "gradient_aggregation_group": None,
        "enable_parallel_optimizer": None,
        "gradients_mean": True,
    }
)
_ALIASES = {"pipeline_stage": "pipeline_stages"}


def set_context(**arguments: Any) -> None:
    """Set how blocks run and on which device.

    Args:
        mode: GRAPH_MODE compiles blocks where that repays, by a rule whose answer is printed; PYNATIVE_MODE never.
        device_target: "Ascend", "GPU" or "CPU". ``--device`` and SHARDWISE_DEVICE win over it.

    Raises:
        ConfigError: an unknown argument or value, or a device that is not there.
    """
    for name, value in arguments.items():
        if name == "mode":
            _set_mode(value)
        elif name == "device_target":
            _set_target(value)
        elif name in _NO_EFFECT:
            _tell("set_context", name, value, _NO_EFFECT[name])
        else:
            raise unknown("set_context", name, value, ["mode", "device_target", *_NO_EFFECT])
        _CONTEXT.said[name] = value


def get_context(name: str) -> Any:
    """The value of an argument of :func:`set_context`, None where it has not been set."""
    if name not in _CONTEXT.defaults and name not in _NO_EFFECT:
        raise unknown("get_context", name, None, [*_CONTEXT.defaults, *_NO_EFFECT])
    return _CONTEXT.get(name)


def set_auto_parallel_context(**arguments: Any) -> None:
    """Set how the model is split.

    Args:
        device_num: number of processes; another number of them in the job is refused.
        parallel_mode: of :class:`ParallelMode`. STAND_ALONE is one device, DATA_PARALLEL whole copies on each; the
            others take the degrees that are given. What is left AUTO_PARALLEL and SEMI_AUTO_PARALLEL search for where
            processes of a CPU are the devices; else, and where ``micro_batch_num`` of SEMI_AUTO_PARALLEL makes the
            batch depend on it, it is data parallel.
        pipeline_stages: degree of the pipeline; ``pipeline_stage`` is its other name.
        pipeline_config: the schedule, as {"pipeline_interleave": bool, "pipeline_scheduler": "1f1b" or "gpipe"}.
        micro_batch_num: micro-batches of a step on each data rank.
        gradient_aggregation_group: number of the buckets in which gradients are exchanged.
        enable_parallel_optimizer: whether weights and optimizer state are split over the data ranks.
        gradients_mean: must be true.
        global_rank: must be this process's.

    Raises:
        ConfigError: an unknown argument or value, or one that contradicts the job.
    """
    given = {_ALIASES.get(name, name): value for name, value in arguments.items()}
    if len(given) < len(arguments):
        raise ConfigError("pipeline_stage and pipeline_stages", "are names for the same thing", "Give one of them")
    for name, value in given.items():
        if name in _PARALLEL_NO_EFFECT:
            _tell("set_auto_parallel_context", name, value, _PARALLEL_NO_EFFECT[name])
        elif name not in _PARALLEL.defaults:
            known = [*_PARALLEL.defaults, *_ALIASES, *_PARALLEL_NO_EFFECT]
            raise unknown("set_auto_parallel_context", name, value, known)
        else:
            _check(name, value)
        _PARALLEL.said[name] = value
    _apply()


def reset_auto_parallel_context() -> None:
    """Forget all that :func:`set_auto_parallel_context` has set."""
    _PARALLEL.said.clear()
    _apply()


def get_auto_parallel_context(name: str) -> Any:
    """The value of an argument of :func:`set_auto_parallel_context`, or its default."""
    name = _ALIASES.get(name, name)
    if name not in _PARALLEL.defaults and name not in _PARALLEL_NO_EFFECT:
        raise unknown("get_auto_parallel_context", name, None, [*_PARALLEL.defaults, *_ALIASES])
    return _PARALLEL.get(name)


def set_seed(seed: int) -> None:
    """Seed the run, and Python's and numpy's generators in this process."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"set_seed({seed!r})", "must be a whole number, 0 or above", "Correct it")
    AMBIENT.set("train.seed", seed, "set_seed")
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _set_mode(value: Any) -> None:
    if value not in (GRAPH_MODE, PYNATIVE_MODE):
        raise ConfigError(f"mode = {value!r}", "must be GRAPH_MODE or PYNATIVE_MODE", "Use one of them")
    # The rule needs the plan and the number of steps; the Trainer applies it and prints what came of it.
    AMBIENT.compile_by_rule = value == GRAPH_MODE
    AMBIENT.set("train.compile", False if value == PYNATIVE_MODE else None, "mode=PYNATIVE_MODE")


def _set_target(value: Any) -> None:
    if value not in _TARGETS:
        raise ConfigError(f"device_target = {value!r}", f"must be one of {', '.join(_TARGETS)}", "Correct it")
    preset = device_override()
    if preset and preset != _TARGETS[value]:
        say(f"set_context(device_target={value!r}): the device is {preset}, as --device or {DEVICE_VARIABLE} says")
        return
    try:
        choose_device(_TARGETS[value])
    except ConfigError as error:
        remedy = f"shardwise run --device cpu SCRIPT, or {DEVICE_VARIABLE}=cpu, runs on the CPU"
        raise ConfigError(f"device_target = {value!r}", error.rule, remedy) from None
    AMBIENT.set("device", _TARGETS[value], "device_target")


def _check(name: str, value: Any) -> None:
    if name in ("device_num", "pipeline_stages", "micro_batch_num", "gradient_aggregation_group"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} = {value!r}", "must be a whole number above 0", "Correct it")
    elif name == "pipeline_config":
        _schedule(value)
    elif name == "parallel_mode" and value not in ParallelMode.MODE_LIST:
        modes = ", ".join(ParallelMode.MODE_LIST)
        raise ConfigError(f"parallel_mode = {value!r}", f"must be one of {modes}", "Use ParallelMode's names")
    elif name == "gradients_mean" and value is not True:
        rule = "must be True: the loss is the mean over the supervised tokens of a step"
        raise ConfigError(f"gradients_mean = {value!r}", rule, "Leave it out")
    elif name == "enable_parallel_optimizer" and not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}", "must be True or False", "Correct it")
    elif name == "global_rank":
        here = rank_here()
        if here not in (None, value):
            raise ConfigError(f"global_rank = {value!r}", f"this process has rank {here}", "Leave it out")


def _schedule(config: Any) -> str | None:
    """The key ``strategy.schedule`` that MindSpore's ``pipeline_config`` stands for; None where it says nothing."""
    if config is None:
        return None
    if not isinstance(config, dict):
        raise ConfigError(
            f"pipeline_config = {config!r}", "must be a dictionary", "Such as {'pipeline_interleave': True}"
        )
    known = ["pipeline_interleave", "pipeline_scheduler"]
    for name, value in config.items():
        if name not in known:
            raise unknown("pipeline_config", str(name), value, known)
    interleave, scheduler = config.get("pipeline_interleave", False), config.get("pipeline_scheduler", "1f1b")
    value = f"pipeline_config = {config!r}"
    if not isinstance(interleave, bool):
        raise ConfigError(value, "pipeline_interleave must be True or False", "Correct it")
    if scheduler not in (("1f1b",) if interleave else ("1f1b", "gpipe")):
        rule = "pipeline_scheduler must be '1f1b'" + (" where stages are interleaved" if interleave else " or 'gpipe'")
        raise ConfigError(value, rule, "Correct it")
    return "interleaved" if interleave else str(scheduler)


def _apply() -> None:
    """Hand over to the Trainer that follows what the script has said so far."""
    said = _PARALLEL.said
    mode, stages, split = said.get("parallel_mode"), said.get("pipeline_stages"), said.get("enable_parallel_optimizer")
    device_num = said.get("device_num")
    if mode == ParallelMode.STAND_ALONE and device_num not in (None, 1):
        raise ConfigError(f"device_num = {device_num}", "parallel_mode stand_alone has one device", "Use device_num=1")
    if mode in (ParallelMode.STAND_ALONE, ParallelMode.DATA_PARALLEL) and stages not in (None, 1):
        raise ConfigError(f"pipeline_stages = {stages}", f"parallel_mode {mode} has one stage", "Leave it out")
    AMBIENT.device_num = 1 if mode == ParallelMode.STAND_ALONE else device_num
    devices_said(AMBIENT.device_num)
    AMBIENT.micro_batch_num = said.get("micro_batch_num")
    is_semi = mode == ParallelMode.SEMI_AUTO_PARALLEL and AMBIENT.micro_batch_num is None
    AMBIENT.planned = mode == ParallelMode.AUTO_PARALLEL or is_semi
    group = said.get("gradient_aggregation_group")
    AMBIENT.set("strategy.gradient_aggregation_group", group, "gradient_aggregation_group")
    whole = split is False or (mode == ParallelMode.DATA_PARALLEL and not split)
    data_parallel = 1 if mode == ParallelMode.DATA_PARALLEL else None
    AMBIENT.set("strategy.pp", stages or data_parallel, "pipeline_stages")
    AMBIENT.set("strategy.schedule", _schedule(said.get("pipeline_config")), "pipeline_config")
    AMBIENT.set("strategy.tp", data_parallel, "parallel_mode")
    AMBIENT.set("strategy.dp_shard", 1 if whole else None, "parallel_mode or enable_parallel_optimizer")
    AMBIENT.set("strategy.dp_replicate", 1 if split else None, "enable_parallel_optimizer")


def _tell(function: str, name: str, value: Any, why: str) -> None:
    say(f"{function}({name}={value!r}) has no effect: {why}")
