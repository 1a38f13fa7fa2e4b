"""``set_context`` and its kind: how blocks run, on which device, and from which seed, for the Trainer that follows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from shardwise.api.ambient import AMBIENT
from shardwise.api.contact import DEVICE_VARIABLE, device_override
from shardwise.errors import ConfigError
from shardwise.launch.devices import choose_device
from shardwise.log import say
from shardwise.mindspore.arguments import Arguments, check_switch, tell
from shardwise.mindspore.parallel.context import (
    ParallelMode,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "ParallelMode",
    "get_auto_parallel_context",
    "get_context",
    "get_seed",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_context",
    "set_deterministic",
    "set_device",
    "set_seed",
]

GRAPH_MODE = 0
PYNATIVE_MODE = 1
_TARGETS = {"Ascend": "npu", "GPU": "cuda", "CPU": "cpu"}

# Arguments without an effect here, and why.
_LOCAL_RANK = "each process takes the device of its local rank"
_DETERMINISTIC = "CPU runs repeat to the bit; on other devices it depends on the operations"
NO_EFFECT = {
    "device_id": _LOCAL_RANK,
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
    "deterministic": _DETERMINISTIC,
    "ascend_config": "the settings of the device are those of torch-npu",
    "gpu_config": "the settings of the device are those of PyTorch",
    "aoe_tune_mode": "operators are not tuned",
    "aoe_config": "operators are not tuned",
    "runtime_num_threads": "OMP_NUM_THREADS sets it",
    "inter_op_parallel_num": "OMP_NUM_THREADS sets it",
    "env_config_path": "settings come from run.yaml",
    "print_file_path": "output goes to logs/",
    "check_bprop": "gradients are those of PyTorch's autograd",
    "debug_level": "there are no debug levels",
    "precompile_only": "nothing is compiled before the first step",
    "op_timeout": "the variable SHARDWISE_TIMEOUT_SECONDS sets it",
}

_CONTEXT = Arguments("set_context", {"mode": PYNATIVE_MODE, "device_target": None}, NO_EFFECT)


def set_context(**arguments: Any) -> None:
    """Set how blocks run and on which device.

    Args:
        mode: GRAPH_MODE compiles blocks where that repays, by a rule whose answer is printed; PYNATIVE_MODE never.
        device_target: "Ascend", "GPU" or "CPU". ``--device`` and SHARDWISE_DEVICE win over it.

    Raises:
        ConfigError: an unknown argument or value, or a device that is not there.
    """
    _CONTEXT.take(arguments, _set)


def get_context(name: str) -> Any:
    """The value of an argument of :func:`set_context`, None where it has not been set."""
    return _CONTEXT.get("get_context", name)


def set_device(device_target: str, device_id: int | None = None) -> None:
    """Set the device alone, as ``set_context(device_target=...)`` does.

    Raises:
        ConfigError: an unknown device, or one that is not there.
    """
    if device_id is not None:
        tell("set_device", "device_id", device_id, _LOCAL_RANK)
    _set_target("set_device", device_target)
    _CONTEXT.said["device_target"] = device_target


def set_deterministic(deterministic: bool) -> None:
    """Say what repeats to the bit; nothing is set.

    Raises:
        ConfigError: neither True nor False.
    """
    tell("set_deterministic", "deterministic", check_switch("deterministic", deterministic), _DETERMINISTIC)


def set_seed(seed: int) -> None:
    """Seed the run, and Python's and numpy's generators in this process."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"set_seed({seed!r})", "must be a whole number, 0 or above", "Correct it")
    AMBIENT.set("train.seed", seed, "set_seed")
    random.seed(seed)
    np.random.seed(seed % 2**32)


def get_seed() -> int | None:
    """What :func:`set_seed` has set, None where it was not called."""
    seed, _ = AMBIENT.keys.get("train.seed", (None, ""))
    return seed


def _set(name: str, value: Any) -> None:
    if name == "mode":
        _set_mode(value)
    else:
        _set_target("set_context", value)


def _set_mode(value: Any) -> None:
    if value not in (GRAPH_MODE, PYNATIVE_MODE):
        raise ConfigError(f"mode = {value!r}", "must be GRAPH_MODE or PYNATIVE_MODE", "Use one of them")
    # The rule needs the plan and the number of steps; the Trainer applies it and prints what came of it.
    AMBIENT.compile_by_rule = value == GRAPH_MODE
    AMBIENT.set("train.compile", False if value == PYNATIVE_MODE else None, "mode=PYNATIVE_MODE")


def _set_target(function: str, value: Any) -> None:
    if value not in _TARGETS:
        raise ConfigError(f"device_target = {value!r}", f"must be one of {', '.join(_TARGETS)}", "Correct it")
    preset = device_override()
    if preset and preset != _TARGETS[value]:
        say(f"{function}(device_target={value!r}): the device is {preset}, as --device or {DEVICE_VARIABLE} says")
        return
    try:
        choose_device(_TARGETS[value])
    except ConfigError as error:
        remedy = f"shardwise run --device cpu SCRIPT, or {DEVICE_VARIABLE}=cpu, runs on the CPU"
        raise ConfigError(f"device_target = {value!r}", error.rule, remedy) from None
    AMBIENT.set("device", _TARGETS[value], "device_target")
