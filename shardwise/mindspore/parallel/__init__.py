"""``parallel``: how the model is split, by the context of the process or by methods of ``AutoParallel``."""

from __future__ import annotations

from typing import Any

from shardwise.mindspore.arguments import Arguments
from shardwise.mindspore.parallel.auto_parallel import AutoParallel

__all__ = ["AutoParallel", "get_algo_parameters", "reset_algo_parameters", "set_algo_parameters"]

_SEARCH = "the search is not over operators; what it keeps to is the section strategy"
_ALGO = Arguments(
    "set_algo_parameters",
    {},
    {
        "fully_use_devices": "a plan uses all devices of the job",
        "elementwise_op_strategy_follow": _SEARCH,
        "enable_algo_approxi": _SEARCH,
        "algo_approxi_epsilon": _SEARCH,
        "tensor_slice_align_enable": _SEARCH,
        "tensor_slice_align_size": _SEARCH,
    },
)


def set_algo_parameters(**arguments: Any) -> None:
    """Say why parameters of MindSpore's search over operators have no effect.

    Raises:
        ConfigError: an unknown argument.
    """
    _ALGO.take(arguments, lambda name, value: None)


def get_algo_parameters(name: str) -> Any:
    """What :func:`set_algo_parameters` was given, None where it was not."""
    return _ALGO.get("get_algo_parameters", name)


def reset_algo_parameters() -> None:
    """Forget what :func:`set_algo_parameters` was given."""
    _ALGO.said.clear()
