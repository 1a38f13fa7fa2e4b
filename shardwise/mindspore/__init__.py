"""MindSpore's names for a parallel job, for scripts that were written for it: ``import shardwise.mindspore as ms``.

A translation of names. Each argument has its effect, or a printed line that says why it has none; an unknown one is
refused with the nearest.
"""

from __future__ import annotations

from shardwise.api.messages import show_refusals
from shardwise.mindspore import communication, dataset
from shardwise.mindspore.context import (
    GRAPH_MODE,
    PYNATIVE_MODE,
    ParallelMode,
    get_auto_parallel_context,
    get_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_context,
    set_seed,
)

__all__ = [
    "GRAPH_MODE",
    "PYNATIVE_MODE",
    "ParallelMode",
    "communication",
    "dataset",
    "get_auto_parallel_context",
    "get_context",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_context",
    "set_seed",
]

show_refusals()
