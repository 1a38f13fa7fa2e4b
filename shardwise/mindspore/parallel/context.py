"""``set_auto_parallel_context``: how the model of the Trainer that follows is split."""

from __future__ import annotations

from typing import Any

from shardwise.api.ambient import AMBIENT
from shardwise.api.contact import devices_said, rank_here
from shardwise.api.messages import unknown
from shardwise.errors import ConfigError
from shardwise.log import say
from shardwise.mindspore.arguments import Arguments, check_choice, check_number, check_switch, tell


class ParallelMode:
    """Names of the parallel modes. What a mode leaves open is filled in, and printed with the plan."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"
    MODE_LIST = (STAND_ALONE, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL)


# Arguments without an effect here, and why.
NO_EFFECT = {
    "auto_parallel_search_mode": "what is not given is filled by the rule that the plan prints",
    "search_mode": "what is not given is filled by the rule that the plan prints",
    "parameter_broadcast": "every rank reads its own part of the weights",
    "strategy_ckpt_load_file": "the plan is plan.json in output_dir",
    "strategy_ckpt_save_file": "the plan is plan.json in output_dir",
    "strategy_ckpt_config": "the plan is plan.json in output_dir",
    "full_batch": "rows are handed out by the Trainer",
    "dataset_strategy": "rows are handed out by the Trainer",
    "enable_alltoall": "the collectives follow from the plan",
    "all_reduce_fusion_config": "gradient_aggregation_group numbers the buckets",
    "comm_fusion": "gradient_aggregation_group numbers the buckets",
    "gradient_fp32_sync": "gradients are summed in the precision of the masters",
    "force_fp32_communication": "gradients are summed in the precision of the masters",
    "loss_repeated_mean": "the loss is the mean over supervised tokens whatever the plan",
    "pipeline_result_broadcast": "the loss reaches every rank anyway",
    "group_ckpt_save_file": "checkpoints load under any plan",
}
# Keys of parallel_optimizer_config: those without an effect, and why.
_OPTIMIZER_NO_EFFECT = {
    "gradient_accumulation_shard": "the plan and the memory of a device decide it",
    "parallel_optimizer_threshold": "small weights are split together with their block",
}
_LEVELS = ("level1", "level2", "level3")

_PARALLEL = Arguments(
    "set_auto_parallel_context",
    {
        "parallel_mode": ParallelMode.STAND_ALONE,
        "device_num": None,
        "global_rank": None,
        "pipeline_stages": 1,
        "pipeline_config": None,
        "micro_batch_num": None,
        "gradient_aggregation_group": None,
        "enable_parallel_optimizer": None,
        "parallel_optimizer_config": None,
        "gradients_mean": True,
    },
    NO_EFFECT,
    aliases={"pipeline_stage": "pipeline_stages"},
)


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
        parallel_optimizer_config: how, where they are: {"optimizer_weight_shard_size": over so many data ranks, -1 for
            all, "optimizer_level": "level3" gathers the weights anew for the backward pass}.
        gradients_mean: must be true.
        global_rank: must be this process's.

    Raises:
        ConfigError: an unknown argument or value, or one that contradicts the job.
    """
    _PARALLEL.take(arguments, _check)
    if "parallel_optimizer_config" in arguments and not _PARALLEL.said.get("enable_parallel_optimizer"):
        say("parallel_optimizer_config has an effect with enable_parallel_optimizer=True alone")
    _apply()


def reset_auto_parallel_context() -> None:
    """Forget all that :func:`set_auto_parallel_context` has set."""
    _PARALLEL.said.clear()
    _apply()


def get_auto_parallel_context(name: str) -> Any:
    """The value of an argument of :func:`set_auto_parallel_context`, or its default."""
    return _PARALLEL.get("get_auto_parallel_context", name)


def _check(name: str, value: Any) -> None:
    if name in ("device_num", "pipeline_stages", "micro_batch_num", "gradient_aggregation_group"):
        check_number(name, value)
    elif name == "pipeline_config":
        _schedule(value)
    elif name == "parallel_optimizer_config":
        _check_optimizer({} if value is None else value)
    elif name == "parallel_mode":
        check_choice(name, value, ParallelMode.MODE_LIST)
    elif name == "gradients_mean" and value is not True:
        rule = "must be True: the loss is the mean over the supervised tokens of a step"
        raise ConfigError(f"gradients_mean = {value!r}", rule, "Leave it out")
    elif name == "enable_parallel_optimizer":
        check_switch(name, value)
    elif name == "global_rank":
        here = rank_here()
        if here not in (None, value):
            raise ConfigError(f"global_rank = {value!r}", f"this process has rank {here}", "Leave it out")


def _schedule(config: Any) -> str | None:
    """The key ``strategy.schedule`` that MindSpore's ``pipeline_config`` stands for; None where it says nothing."""
    if config is None:
        return None
    _check_keys("pipeline_config", config, ["pipeline_interleave", "pipeline_scheduler"])
    interleave, scheduler = config.get("pipeline_interleave", False), config.get("pipeline_scheduler", "1f1b")
    value = f"pipeline_config = {config!r}"
    if not isinstance(interleave, bool):
        raise ConfigError(value, "pipeline_interleave must be True or False", "Correct it")
    if scheduler not in (("1f1b",) if interleave else ("1f1b", "gpipe")):
        rule = "pipeline_scheduler must be '1f1b'" + (" where stages are interleaved" if interleave else " or 'gpipe'")
        raise ConfigError(value, rule, "Correct it")
    return "interleaved" if interleave else str(scheduler)


def _check_optimizer(config: Any) -> None:
    known = ["optimizer_weight_shard_size", "optimizer_level"]
    _check_keys("parallel_optimizer_config", config, [*known, *_OPTIMIZER_NO_EFFECT])
    for name, why in _OPTIMIZER_NO_EFFECT.items():
        if name in config:
            tell("parallel_optimizer_config", name, config[name], why)
    if config.get("optimizer_weight_shard_size", -1) != -1:
        check_number("optimizer_weight_shard_size", config["optimizer_weight_shard_size"])
    if "optimizer_level" in config:
        check_choice("optimizer_level", config["optimizer_level"], _LEVELS)


def _check_keys(name: str, config: Any, known: list[str]) -> None:
    if not isinstance(config, dict):
        raise ConfigError(f"{name} = {config!r}", "must be a dictionary", f"With keys of {', '.join(known)}")
    for key, value in config.items():
        if key not in known:
            raise unknown(name, str(key), value, known)


def _apply() -> None:
    """Hand over to the Trainer what all arguments together mean."""
    said = _PARALLEL.said
    mode = said.get("parallel_mode")
    stages = said.get("pipeline_stages")
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
    one_if_data_parallel = 1 if mode == ParallelMode.DATA_PARALLEL else None
    AMBIENT.set("strategy.pp", stages or one_if_data_parallel, "pipeline_stages")
    AMBIENT.set("strategy.schedule", _schedule(said.get("pipeline_config")), "pipeline_config")
    AMBIENT.set("strategy.tp", one_if_data_parallel, "parallel_mode")
    _apply_optimizer(said, mode == ParallelMode.DATA_PARALLEL)


def _apply_optimizer(said: dict[str, Any], data_parallel: bool) -> None:
    """The data axis: whole copies on every data rank, or weights and state split over all or some of them."""
    split = said.get("enable_parallel_optimizer")
    config = (said.get("parallel_optimizer_config") or {}) if split else {}
    size, level = config.get("optimizer_weight_shard_size", -1), config.get("optimizer_level")
    whole = split is False or (data_parallel and not split)
    part = None if size == -1 else size
    source = "optimizer_weight_shard_size" if part else "parallel_mode or enable_parallel_optimizer"
    AMBIENT.set("strategy.dp_shard", 1 if whole else part, source)
    AMBIENT.set("strategy.dp_replicate", 1 if split and part is None else None, "enable_parallel_optimizer")
    AMBIENT.set("strategy.reshard", None if level is None else level == "level3", "optimizer_level")
