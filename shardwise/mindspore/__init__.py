"""MindSpore's names for a parallel job, for scripts that were written for it: ``import shardwise.mindspore as ms``.

A translation of names. Each argument has its effect, or a printed line that says why it has none; an unknown one is
refused with the nearest. A name of MindSpore's that is not here is refused with what serves in its place.
"""

from __future__ import annotations

from typing import NoReturn

from shardwise.api.messages import show_refusals
from shardwise.mindspore import communication, dataset, parallel, train
from shardwise.mindspore.absent import refuse
from shardwise.mindspore.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    get_context,
    get_seed,
    set_context,
    set_deterministic,
    set_device,
    set_seed,
)
from shardwise.mindspore.parallel import get_algo_parameters, reset_algo_parameters, set_algo_parameters
from shardwise.mindspore.parallel.context import (
    ParallelMode,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from shardwise.mindspore.train import CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "CheckpointConfig",
    "LossMonitor",
    "ModelCheckpoint",
    "ParallelMode",
    "TimeMonitor",
    "communication",
    "dataset",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "get_context",
    "get_seed",
    "parallel",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "set_context",
    "set_deterministic",
    "set_device",
    "set_seed",
    "train",
]

show_refusals()


def __getattr__(name: str) -> NoReturn:
    """Refuse what MindSpore has in this module and Shardwise has elsewhere, or not."""
    refuse(__name__, name)
