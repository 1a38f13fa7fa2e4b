"""From a plain tree to a :class:`RunConfig`, with every rule that needs neither model nor devices.

What is wrong is said in one message: the dotted key with its value, the rule, the nearest thing that
works. Imports no torch.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwise.config import NOT_AVAILABLE, nearest
from shardwise.errors import ConfigError, require
from shardwise.spec.data_rules import check_data, check_packing
from shardwise.spec.keys import get, section_of
from shardwise.spec.learning_rate import check_schedule_settings
from shardwise.spec.mistakes import config_error
from shardwise.spec.ranges import check_last_step, parse_steps
from shardwise.spec.run import TRACKERS, RunConfig, tracker_names

BEST_METRICS = ("eval_loss",)

# Keys of the contract whose feature is not built yet: the values that leave the feature out.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (False,),
    "strategy.cp": (None, 1),
    "strategy.ep": (None, 1),
}


def parse_run(tree: dict[str, Any], planned: bool = False) -> RunConfig:
    """The run that a tree describes; paths in it are relative to the working directory.

    A run that is only ``planned`` may ask for what this version cannot train with yet.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of the wrong kind, a feature
            that is not built yet, or keys that contradict each other.
    """
    try:
        run = RunConfig.model_validate(_without_empty_sections(tree, RunConfig))
    except ValidationError as error:
        raise config_error(error.errors(include_url=False)) from None
    for check in _CHECKS:
        if not (planned and check is _check_available):
            check(run)
    return run


def _without_empty_sections(tree: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """A section whose lines are all commented out reads as null, and means its defaults."""
    sections = {name for name, field in model.model_fields.items() if section_of(field.annotation)}
    return {key: value for key, value in tree.items() if value is not None or key not in sections}


def _check_available(run: RunConfig) -> None:
    for key, neutral in _NEUTRAL.items():
        value = get(run, key)
        if value not in neutral:
            works = next((choice for choice in neutral if choice not in (None, ())), None)
            names = str(works).lower()
            shown = (
                f"{key} = {value.model_dump(exclude_unset=True)}"
                if isinstance(value, BaseModel)
                else f"{key} = {value!r}"
            )
            raise ConfigError(shown, NOT_AVAILABLE, "Leave it out" if works is None else f"Use {key}: {names}")
    if run.strategy.recompute == "selective":
        raise ConfigError("strategy.recompute = 'selective'", NOT_AVAILABLE, "Use none, full or a number of blocks")


def _check_batch(run: RunConfig) -> None:
    rows, accumulation = run.train.global_batch_size, run.train.gradient_accumulation_steps
    require(
        rows is None or accumulation is None,
        f"train.global_batch_size = {rows} and train.gradient_accumulation_steps = {accumulation}",
        "are two ways to say the same thing",
        "Give one of them",
    )
    require(
        accumulation is None or run.strategy.micro_batch_size is not None,
        f"train.gradient_accumulation_steps = {accumulation}",
        "needs strategy.micro_batch_size: the global batch is their product over all data ranks",
        "Give strategy.micro_batch_size, or train.global_batch_size instead",
    )


def _check_schedule(run: RunConfig) -> None:
    schedule, virtual = run.strategy.schedule, run.strategy.virtual_stages
    require(
        schedule == "interleaved" or virtual in (None, 1),
        f"strategy.virtual_stages = {virtual}",
        f"several stages on a rank are the schedule interleaved, and strategy.schedule is {schedule}",
        "Use strategy.schedule=interleaved, or leave it out",
    )
    require(
        schedule != "interleaved" or virtual != 1,
        "strategy.virtual_stages = 1 with strategy.schedule = interleaved",
        "one stage on a rank leaves nothing to interleave",
        "Use strategy.virtual_stages=2, or strategy.schedule=1f1b",
    )


def _check_tables(run: RunConfig) -> None:
    strategy = run.strategy
    require(
        strategy.tp_whole is None or strategy.plan is not None or (strategy.tp or 1) > 1,
        f"strategy.tp_whole = {strategy.tp_whole}",
        f"chooses how a block is split over the tensor ranks, and strategy.tp is {strategy.tp or 'not given'}",
        "Give strategy.tp=2 or more, or leave it out",
    )


def _check_length(run: RunConfig) -> None:
    epochs, steps = run.train.epochs, run.train.max_steps
    require(
        epochs is None or steps is None,
        f"train.epochs = {epochs} and train.max_steps = {steps}",
        "only one of them can end the run",
        "Give one of them",
    )
    warmup_steps, ratio = run.train.warmup_steps, run.train.warmup_ratio
    require(
        not (warmup_steps and ratio),
        f"train.warmup_steps = {warmup_steps} and train.warmup_ratio = {ratio}",
        "only one of them can set the warm-up",
        "Give one of them",
    )


def _check_optimizer(run: RunConfig) -> None:
    """An option of the other optimizer would be ignored; nothing is ignored silently."""
    train = run.train
    foreign = ("momentum",) if train.optimizer == "adamw" else ("adam_beta1", "adam_beta2", "adam_eps")
    other = {"adamw": "sgd", "sgd": "adamw"}[train.optimizer]
    for name in foreign:
        require(
            getattr(train, name) == type(train).model_fields[name].default,
            f"train.{name} = {getattr(train, name)}",
            f"belongs to the optimizer {other}, and train.optimizer is {train.optimizer}",
            f"Leave train.{name} out, or use train.optimizer: {other}",
        )
    check_schedule_settings(train)


def _check_compile(run: RunConfig) -> None:
    dropout = run.lora.dropout if run.lora is not None else 0.0
    require(
        not (run.train.compile and dropout),
        f"train.compile = true with lora.dropout = {dropout}",
        "masks of adapters are drawn by name, which does not compile",
        "Use lora.dropout: 0, or train.compile: false",
    )


def _check_interval(key: str, strategy: str, steps: int | None) -> None:
    require(
        strategy != "steps" or steps is not None,
        f"{key}.strategy = 'steps'",
        f"needs {key}.steps, the number of steps between two",
        f"Give {key}.steps=100, or {key}.strategy=epoch",
    )
    require(
        strategy == "steps" or steps is None,
        f"{key}.steps = {steps}",
        f"has no effect while {key}.strategy is {strategy}",
        f"Set {key}.strategy: steps, or leave {key}.steps out",
    )


def _check_save(run: RunConfig) -> None:
    _check_interval("save", run.save.strategy, run.save.steps)
    require(
        not run.overwrite or run.resume == "no",
        f"overwrite = true with resume = {run.resume!r}",
        "it would delete the checkpoints that the run is to go on from",
        "Use overwrite=false to go on, or resume=no to start anew",
    )
    require(
        not run.save.async_ or run.save.strategy != "no",
        "save.async = true",
        "has no effect while save.strategy is no",
        "Give save.strategy, or leave save.async out",
    )
    _check_best(run)


def _check_best(run: RunConfig) -> None:
    """Every checkpoint is to have an evaluation of its own step, else there is nothing to compare it by."""
    save, evaluation = run.save, run.eval
    require(
        save.export != "best" or save.best != "no",
        "save.export = 'best'",
        "needs save.best, which says what is best",
        "Give save.best=eval_loss, or save.export=true",
    )
    if save.best == "no":
        return
    value = f"save.best = {save.best!r}"
    require(save.best in BEST_METRICS, value, f"must be no or {' or '.join(BEST_METRICS)}", "Did you mean eval_loss?")
    require(save.strategy != "no", value, "has no effect while save.strategy is no", "Give save.strategy")
    require(evaluation.strategy != "no", value, "needs evaluations, and eval.strategy is no", "Give eval.strategy")
    fits = save.strategy == evaluation.strategy and (save.steps or 1) % (evaluation.steps or 1) == 0
    shown = [f"{section} {each.steps or each.strategy}" for section, each in (("save", save), ("eval", evaluation))]
    require(
        fits,
        f"{value} with {' and '.join(shown)}",
        "every checkpoint needs an evaluation of its step",
        "Use the same strategy for both, and save.steps a multiple of eval.steps",
    )


def _check_eval(run: RunConfig) -> None:
    _check_interval("eval", run.eval.strategy, run.eval.steps)
    require(
        run.eval.strategy == "no" or run.data.eval is not None or bool(run.data.val_size),
        f"eval.strategy = {run.eval.strategy!r}",
        "needs rows to evaluate",
        "Give data.eval=FILE or data.val_size=0.05, or eval.strategy=no",
    )
    patience = run.train.early_stopping_patience
    require(
        patience is None or run.eval.strategy != "no",
        f"train.early_stopping_patience = {patience}",
        "counts evaluations, and eval.strategy is no",
        "Give data.eval=FILE and eval.strategy=epoch, or leave it out",
    )


def _check_lora(run: RunConfig) -> None:
    require(
        run.use_lora or run.lora is None or "use_lora" not in run.model_fields_set,
        f"use_lora = false with lora = {run.lora.model_dump(exclude_unset=True) if run.lora else None}",
        "contradict each other",
        "Leave out one of the two",
    )
    lora = run.lora
    if lora is None:
        return
    require(lora.alpha != 0, "lora.alpha = 0", "multiplies all that the adapter learns by 0", "Use lora.alpha: 16")
    targets = lora.target_modules
    require(
        targets is None or len(targets) > 0,
        f"lora.target_modules = {targets!r}",
        "names no module",
        "Name linear layers, such as [q_proj, v_proj], or leave it out for all of them",
    )
    if isinstance(targets, str):
        try:
            re.compile(targets)
        except re.error as error:
            rule = f"is no regular expression ({error})"
            raise ConfigError(f"lora.target_modules = {targets!r}", rule, "Write a list: [q_proj, v_proj]") from None
    for key, names in (("target_modules", targets), ("modules_to_save", lora.modules_to_save)):
        empty = not isinstance(names, str) and "" in (names or ())
        require(not empty, f"lora.{key} = {names!r}", "holds an empty name", "Name modules, such as [q_proj, v_proj]")


def _check_log(run: RunConfig) -> None:
    for name in tracker_names(run):
        near = nearest(name.lower(), TRACKERS)
        require(
            name in TRACKERS,
            f"log.report_to = {name!r}",
            f"must be of {', '.join(TRACKERS)}, or none",
            f"Did you mean {near}?" if near else "",
        )
    steps = parse_steps(run.log.profile_steps, "log.profile_steps")
    if run.train.max_steps is not None:
        check_last_step(steps, run.train.max_steps, "log.profile_steps")


_CHECKS = (
    *(_check_available, _check_batch, _check_schedule, _check_tables, _check_length, check_packing, _check_optimizer),
    *(_check_compile, _check_save, check_data, _check_eval, _check_lora, _check_log),
)
