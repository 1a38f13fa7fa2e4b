"""``TrainingArguments``: the spellings of Hugging Face and MindFormers, translated into keys of ``run.yaml``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.api.fields import HARMLESS, HONOURED, REFUSED
from shardwise.api.messages import unknown
from shardwise.config import STRATEGY_KEYS
from shardwise.errors import ConfigError
from shardwise.spec.aliases import put
from shardwise.spec.keys import known_keys
from shardwise.spec.learning_rate import SETTINGS
from shardwise.spec.strategy import filling_micro_batch_size

_DEFAULT_PER_DEVICE_ROWS = 8  # Hugging Face's, where only the accumulation is given
_DEFAULT_SAVE_STEPS = 500  # Hugging Face's, for save_strategy="steps" without a number
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw"),
    "sgd": "sgd",
}
# Sections whose keys are also known by their last part: TrainingArguments(max_length=..., tp=2).
_SHORT_SECTIONS = ("train", "data", "strategy")
_NOT_SHORT = ("data.train", "data.eval", "data.seed")


class TrainingArguments:
    """How to train. Keyword arguments alone; an unknown one is refused with the nearest name.

    Besides the fields of :mod:`shardwise.api.fields`, every key of ``run.yaml`` is one: by its last part in the
    sections train, data and strategy (``tp=2``), by its whole name else (``**{"log.rows": True}``).

    Attributes:
        given: the arguments as they were given.
        tree: the keys of ``run.yaml`` that they set.
        per_device_eval_rows: rows of an evaluation step on each data rank, None if not given.
        notes: a line for each group of fields without effect.

    Raises:
        ConfigError: an unknown or refused field, or a value that cannot be followed.
    """

    def __init__(self, output_dir: str | os.PathLike[str] | None = None, **given: Any) -> None:
        if output_dir is not None:
            given = {"output_dir": os.fspath(output_dir), **given}
        self.given = given
        self.tree: dict[str, Any] = {}
        self.per_device_eval_rows: int | None = None
        self.notes: list[str] = []
        own = own_names()
        for name, value in given.items():
            self._take(name, _plain(value), own)
        self._take_length()
        self._take_steps()

    def __repr__(self) -> str:
        return f"TrainingArguments({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    def _take(self, name: str, value: Any, own: Mapping[str, str]) -> None:
        if name in HONOURED:
            key = HONOURED[name]
            if key is not None:
                if value is not None:
                    self._put(key, value, name)
            elif name in _TRANSLATIONS:
                _TRANSLATIONS[name](self, value, name)
        elif name in REFUSED:
            reason, neutral = REFUSED[name]
            if value not in neutral:
                raise ConfigError(f"{name} = {value!r}", f"is not supported: {reason}", f"Leave {name} out")
        elif name in HARMLESS:
            self.notes.append(f"{name} has no effect: {HARMLESS[name]}")
        elif name in own:
            self._put(own[name], value, name)
        else:
            raise unknown("TrainingArguments", name, value, [*HONOURED, *own, *REFUSED, *HARMLESS])

    def _put(self, key: str, value: Any, name: str) -> None:
        put(self.tree, key, value, name)

    def _number(self, *names: str) -> int | None:
        """The one value of several names for the same thing."""
        values = {name: self.given[name] for name in names if self.given.get(name) is not None}
        if len(set(values.values())) > 1:
            shown = " and ".join(f"{name} = {value!r}" for name, value in values.items())
            raise ConfigError(shown, "are names for the same thing", "Give one of them")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} = {value!r}", "must be a whole number above 0", "Correct it")
            return value
        return None

    def tree_for(
        self, *, batch_size: int | None = None, micro_batch_num: int | None = None, num_stages: int = 1
    ) -> dict[str, Any]:
        """The keys of ``run.yaml``, the batch included.

        G = rows of a device x data ranks x accumulation; the number of data ranks is not known here. G is the same
        with any number of stages; a pipeline with fewer micro-batches than stages gets smaller ones.

        Args:
            batch_size: rows of a device that the data set asks for; it must be what the arguments say, if they do.
            micro_batch_num: the same for the accumulation, from the parallel context.
            num_stages: stages of the pipeline.

        Raises:
            ConfigError: numbers that contradict each other or do not divide.
        """
        tree = {key: dict(value) if isinstance(value, dict) else value for key, value in self.tree.items()}
        rows = self._number("per_device_train_batch_size", "train_batch_size", "batch_size")
        rows = _one("batch_size", rows, "train_dataset.batch", batch_size)
        accumulation = self._number("gradient_accumulation_steps", "micro_batch_num")
        accumulation = _one("gradient_accumulation_steps", accumulation, "micro_batch_num", micro_batch_num)
        if rows is None and accumulation is None:
            return tree
        train, strategy = tree.setdefault("train", {}), tree.setdefault("strategy", {})
        if "global_batch_size" in train:
            value = f"global_batch_size = {train['global_batch_size']}, batch of a device = {rows}"
            raise ConfigError(value, "are two ways to give the batch", "Give one of them")
        rows, accumulation = rows or _DEFAULT_PER_DEVICE_ROWS, accumulation or 1
        chosen = filling_micro_batch_size(rows, accumulation, num_stages)
        micro_batch_size = strategy.setdefault("micro_batch_size", chosen)
        if rows * accumulation % micro_batch_size:
            value = f"micro_batch_size = {micro_batch_size}"
            near = max(n for n in range(1, micro_batch_size) if rows * accumulation % n == 0)
            raise ConfigError(value, f"does not divide {rows} x {accumulation} rows of a data rank", f"Use {near}")
        train["gradient_accumulation_steps"] = rows * accumulation // micro_batch_size
        return tree

    def _take_length(self) -> None:
        epochs = self.given.get("num_train_epochs", self.given.get("epochs"))
        steps = _whole_number("max_steps", self.given.get("max_steps"))
        if steps is not None and steps > 0:
            self._put("train.max_steps", steps, "max_steps")
            if epochs is not None:
                self.notes.append(f"epochs = {epochs} has no effect: max_steps = {steps} wins, as Hugging Face has it")
        elif epochs is not None:
            if isinstance(epochs, bool) or not isinstance(epochs, int | float) or epochs != int(epochs):
                rule = "must be a whole number"
                raise ConfigError(f"epochs = {epochs!r}", rule, "Use max_steps for parts of an epoch")
            self._put("train.epochs", int(epochs), "epochs")

    def _take_steps(self) -> None:
        """Hugging Face saves every 500 steps, and evaluates as often as it logs, where no number is given."""
        save = self.tree.get("save", {})
        if "save_steps" in self.given:
            if save.get("strategy", "steps") == "steps":
                self._put("save.strategy", "steps", "save_steps")
                self._put("save.steps", self.given["save_steps"], "save_steps")
            else:
                self.notes.append(f"save_steps has no effect: save_strategy is {save['strategy']}")
        elif save.get("strategy") == "steps" and "steps" not in save:
            self._put("save.steps", _DEFAULT_SAVE_STEPS, "save_strategy")
        evaluation = self.tree.get("eval", {})
        if evaluation.get("strategy") == "steps" and "steps" not in evaluation:
            self._put("eval.steps", self.given.get("logging_steps", _DEFAULT_SAVE_STEPS), "eval_strategy")


def _one(name: str, given: int | None, other: str, asked: int | None) -> int | None:
    if None not in (given, asked) and given != asked:
        raise ConfigError(f"{name} = {given} and {other} = {asked}", "must be equal", f"Use {given} for both")
    return asked if given is None else given


def own_names() -> dict[str, str]:
    """Name -> dotted key, for the keys of ``run.yaml`` that are arguments under their own names."""
    names = {}
    for key in known_keys():
        section, _, name = key.rpartition(".")
        names[key] = key
        if section in _SHORT_SECTIONS and key not in _NOT_SHORT:
            names[name] = key
    return names | {key: f"strategy.{key}" for key in STRATEGY_KEYS}


def _plain(value: Any) -> Any:
    """The value of an enumeration; tuples stay."""
    return getattr(value, "value", value)


def _resume(args: TrainingArguments, value: Any, name: str) -> None:
    if value:
        args._put("resume", "auto" if value is True else os.fspath(value), name)


def _scheduler(args: TrainingArguments, value: Any, name: str) -> None:
    if value not in SETTINGS:
        raise ConfigError(f"{name} = {value!r}", "is not supported", f"Use one of {', '.join(SETTINGS)}")
    warms = args.given.get("warmup_steps") or args.given.get("warmup_ratio")
    if value == "constant" and warms:
        raise ConfigError(f"{name} = 'constant' with a warm-up", "has none", "Use constant_with_warmup")
    args._put("train.lr_scheduler", value, name)


def _scheduler_settings(args: TrainingArguments, value: Any, name: str) -> None:
    """A mapping, or the text of one in JSON, as Hugging Face takes it."""
    settings = value
    if isinstance(value, str) and value:
        try:
            settings = json.loads(value)
        except ValueError:
            settings = value
    if settings and not isinstance(settings, Mapping):
        raise ConfigError(f"{name} = {value!r}", "is no mapping", f"Such as {name}={{'min_lr_rate': 0.1}}")
    if settings:
        args._put("train.lr_scheduler_kwargs", dict(settings), name)


def _warmup(args: TrainingArguments, value: Any, name: str) -> None:
    """Below 1 it is a share of all steps, as Hugging Face reads it."""
    is_share = isinstance(value, float) and 0 < value < 1
    if value is not None:
        args._put("train.warmup_ratio" if is_share else "train.warmup_steps", value, name)


def _optimizer(args: TrainingArguments, value: Any, name: str) -> None:
    if value not in _OPTIMIZERS:
        raise ConfigError(f"{name} = {value!r}", "is not supported", f"Use one of {', '.join(_OPTIMIZERS)}")
    args._put("train.optimizer", _OPTIMIZERS[value], name)


def _bf16(args: TrainingArguments, value: Any, name: str) -> None:
    if value:
        args._put("train.precision", "bf16", name)
    elif value is False:
        args._put("train.precision", "fp32", name)


def _whole_number(name: str, value: Any) -> int | None:
    """``value`` as an int, None where it is None; 2.0 counts as 2.

    Raises:
        ConfigError: it is no whole number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ConfigError(f"{name} = {value!r}", "must be a whole number", f"Use {name}=1")
    return int(value)


def _recompute(args: TrainingArguments, value: Any, name: str) -> None:
    if value:
        args._put("strategy.recompute", "full", name)


def _sampling(args: TrainingArguments, value: Any, name: str) -> None:
    if value not in ("random", "sequential", "group_by_length"):
        raise ConfigError(f"{name} = {value!r}", "is not supported", "Use random, sequential or group_by_length")
    args._put("data.shuffle", value != "sequential", name)
    if value == "group_by_length":
        args._put("data.group_by_length", True, name)


def _logging(args: TrainingArguments, value: Any, name: str) -> None:
    args._put("log.steps", _whole_number(name, value) or 1, name)


def _evaluation(args: TrainingArguments, value: Any, name: str) -> None:
    args._put("eval.strategy", value, name)


def _eval_rows(args: TrainingArguments, value: Any, name: str) -> None:
    args.per_device_eval_rows = args._number(name)


def _best_at_end(args: TrainingArguments, value: Any, name: str) -> None:
    if value:
        args._put("save.best", "eval_loss", name)
        args._put("save.export", "best", name)


def _best_metric(args: TrainingArguments, value: Any, name: str) -> None:
    """Hugging Face reads ``loss`` as ``eval_loss``; without ``load_best_model_at_end`` it asks for nothing."""
    if value not in (None, "loss", "eval_loss"):
        raise ConfigError(f"{name} = {value!r}", "the loss is all that is evaluated", f"Use {name}='eval_loss'")


def _cpu(args: TrainingArguments, value: Any, name: str) -> None:
    if value:
        args._put("device", "cpu", name)


# Those that are not here are taken together: batch, length, save steps.
_TRANSLATIONS: dict[str, Callable[[TrainingArguments, Any, str], None]] = {
    "resume_from_checkpoint": _resume,
    "lr_scheduler_type": _scheduler,
    "lr_scheduler_kwargs": _scheduler_settings,
    "warmup_steps": _warmup,
    "optim": _optimizer,
    "bf16": _bf16,
    "gradient_checkpointing": _recompute,
    "activation_checkpointing": _recompute,
    "train_sampling_strategy": _sampling,
    "logging_steps": _logging,
    "eval_strategy": _evaluation,
    "evaluation_strategy": _evaluation,
    "per_device_eval_batch_size": _eval_rows,
    "load_best_model_at_end": _best_at_end,
    "metric_for_best_model": _best_metric,
    "use_cpu": _cpu,
    "no_cuda": _cpu,
}
