"""``AutoParallel``: a model together with how it is split, as newer scripts for MindSpore write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.api.auto import ModelHandle
from shardwise.errors import ConfigError
from shardwise.log import say
from shardwise.mindspore.arguments import check_choice, check_switch, tell
from shardwise.mindspore.parallel.context import (
    NO_EFFECT,
    ParallelMode,
    get_auto_parallel_context,
    set_auto_parallel_context,
)

_MODES = {
    "semi_auto": ParallelMode.SEMI_AUTO_PARALLEL,
    "sharding_propagation": ParallelMode.AUTO_PARALLEL,
    "recursive_programming": ParallelMode.AUTO_PARALLEL,
}
_THRESHOLD = 64  # KiB, the default of hsdp
_NORMS = "metrics.jsonl has the norm of all gradients at every step"
_PLAN_FILE = NO_EFFECT["strategy_ckpt_save_file"]
# Methods that set nothing, and why.
_METHODS = {
    "comm_fusion": NO_EFFECT["comm_fusion"],
    "dataset_strategy": NO_EFFECT["dataset_strategy"],
    "disable_gradient_fp32_sync": NO_EFFECT["gradient_fp32_sync"],
    "disable_loss_repeated_mean": NO_EFFECT["loss_repeated_mean"],
    "disable_strategy_file_only_for_trainable_params": _PLAN_FILE,
    "dump_local_norm": _NORMS,
    "enable_device_local_norm": _NORMS,
    "enable_fp32_communication": NO_EFFECT["force_fp32_communication"],
    "load_operator_strategy_file": _PLAN_FILE,
    "load_param_strategy_file": _PLAN_FILE,
    "no_init_parameters_in_compile": "every rank reads or draws its own part of the weights",
    "print_local_norm": _NORMS,
    "save_operator_strategy_file": _PLAN_FILE,
    "save_param_strategy_file": _PLAN_FILE,
    "set_group_ckpt_save_file": NO_EFFECT["group_ckpt_save_file"],
    "transformer_opt": "which transfers overlap follows from the plan",
}


class AutoParallel(ModelHandle):
    """A model for the Trainer, whose methods say how it is split: each sets the parallel context of the process.

    Args:
        network: what ``AutoModel`` returns.
        parallel_mode: "semi_auto" keeps to the degrees that are given; "sharding_propagation" and
            "recursive_programming" are ``ParallelMode.AUTO_PARALLEL``.

    Raises:
        ConfigError: a network that is no model of ours, or an unknown mode.
    """

    def __init__(self, network: Any, parallel_mode: str = "semi_auto") -> None:
        if not isinstance(network, ModelHandle):
            rule = "is not split over devices; a model is given by its name"
            value = f"AutoParallel(network) of type {type(network).__name__}"
            raise ConfigError(value, rule, "Use shardwise.AutoModel.from_pretrained(NAME)")
        check_choice("parallel_mode", parallel_mode, tuple(_MODES))
        super().__init__(network.name, network.folder, network.keys)
        set_auto_parallel_context(parallel_mode=_MODES[parallel_mode])

    @property
    def network(self) -> ModelHandle:
        """The model without its split."""
        return ModelHandle(self.name, self.folder, self.keys)

    def pipeline(
        self, stages: int = 1, output_broadcast: bool = False, interleave: bool = False, scheduler: str = "1f1b"
    ) -> None:
        """Split the model into pipeline stages; ``output_broadcast`` has no effect.

        Raises:
            ConfigError: a number of stages below 1, or a schedule that is not there.
        """
        if check_switch("output_broadcast", output_broadcast):
            tell("pipeline", "output_broadcast", True, NO_EFFECT["pipeline_result_broadcast"])
        config = {"pipeline_interleave": interleave, "pipeline_scheduler": scheduler}
        set_auto_parallel_context(pipeline_stages=stages, pipeline_config=config)

    def hsdp(self, shard_size: int = -1, threshold: int = _THRESHOLD, optimizer_level: str = "level1") -> None:
        """Split weights and optimizer state over ``shard_size`` data ranks, -1 for all; ``threshold`` has no effect.

        Raises:
            ConfigError: a size below 1, or an unknown level.
        """
        config = {"optimizer_weight_shard_size": shard_size, "optimizer_level": optimizer_level}
        if threshold != _THRESHOLD:
            config["parallel_optimizer_threshold"] = threshold
        set_auto_parallel_context(enable_parallel_optimizer=True, parallel_optimizer_config=config)

    def enable_gradients_mean(self) -> None:
        """Ask for the mean of the gradients, which they always are."""
        set_auto_parallel_context(gradients_mean=True)

    def get_pipeline_stages(self) -> int:
        """Degree of the pipeline."""
        stages: int = get_auto_parallel_context("pipeline_stages")
        return stages

    def __getattr__(self, name: str) -> Callable[..., None]:
        """A method that sets nothing, and says why when it is called."""
        if name not in _METHODS:
            raise AttributeError(f"AutoParallel has no attribute {name!r}")

        def without_effect(*arguments: Any, **named: Any) -> None:
            shown = [*map(repr, arguments), *(f"{each}={value!r}" for each, value in named.items())]
            say(f"AutoParallel.{name}({', '.join(shown)}) has no effect: {_METHODS[name]}")

        return without_effect
