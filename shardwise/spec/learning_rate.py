"""Which settings a schedule of the learning rate has, and what they must be. Imports no torch."""

from __future__ import annotations

import math

from shardwise.errors import ConfigError
from shardwise.spec.run import TrainConfig

_MIN_LR = ("min_lr", "min_lr_rate")
_STABLE = ("num_decay_steps", "num_stable_steps", "min_lr_ratio", "warmup_type", "decay_type", "num_cycles")
# Schedule -> its settings, as the functions of transformers take them.
SETTINGS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "constant": (),
    "constant_with_warmup": (),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": (*_MIN_LR, "num_cycles"),
    "cosine_warmup_with_min_lr": (*_MIN_LR, "warmup_lr_rate", "num_cycles"),
    "warmup_stable_decay": _STABLE,
}
_LR_END = 1e-7  # transformers' default
_KEY = "train.lr_scheduler_kwargs"


def given_settings(train: TrainConfig) -> dict[str, float | int | str]:
    """The settings of ``train.lr_scheduler_kwargs`` that have a value."""
    return {} if train.lr_scheduler_kwargs is None else train.lr_scheduler_kwargs.model_dump(exclude_none=True)


def num_warmup_steps(train: TrainConfig, total_steps: int) -> int:
    """Warm-up steps: as given, or the given share of all steps, rounded up."""
    return train.warmup_steps or math.ceil(train.warmup_ratio * total_steps)


def check_schedule_settings(train: TrainConfig) -> None:
    """Refuse settings that the schedule does not have, lacks, or that contradict the learning rate.

    Raises:
        ConfigError: with the setting, the rule and what works.
    """
    name, given, rate = train.lr_scheduler, given_settings(train), train.learning_rate
    shown = f"train.lr_scheduler = {name}"
    for setting, value in given.items():
        if setting not in SETTINGS[name]:
            owners = ", ".join(each for each, settings in SETTINGS.items() if setting in settings)
            rule = f"is a setting of {owners}, and {shown}"
            own = f"{name} has {', '.join(SETTINGS[name])}" if SETTINGS[name] else f"{name} has no settings"
            raise ConfigError(f"{_KEY}.{setting} = {value}", rule, f"Leave it out: {own}")
    if "min_lr" in SETTINGS[name] and len(given.keys() & set(_MIN_LR)) != 1:
        rule = "needs the least learning rate: min_lr, or min_lr_rate as a share of train.learning_rate"
        raise ConfigError(shown, rule, f"Give one of them, such as {_KEY}.min_lr_rate=0.1")
    if name == "warmup_stable_decay" and "num_decay_steps" not in given:
        rule = "needs num_decay_steps, in which the learning rate falls at the end"
        raise ConfigError(shown, rule, f"Give {_KEY}.num_decay_steps=100")
    least = given.get("lr_end", _LR_END) if name == "polynomial" else given.get("min_lr")
    if least is not None and not float(least) < rate:
        setting = "lr_end" if name == "polynomial" else "min_lr"
        remedy = f"Use {_KEY}.{setting}={rate / 10:g}" if rate else "Use train.lr_scheduler=constant"
        raise ConfigError(f"{_KEY}.{setting} = {least}", f"must be below train.learning_rate = {rate}", remedy)
    if train.max_steps is not None:
        check_schedule_length(train, train.max_steps)


def check_schedule_length(train: TrainConfig, total_steps: int) -> None:
    """Refuse a decay that would have to begin before the warm-up ends.

    Raises:
        ConfigError: with the longest decay that fits.
    """
    settings = given_settings(train)
    if "num_decay_steps" not in settings or "num_stable_steps" in settings:
        return
    warmup, decay = num_warmup_steps(train, total_steps), int(settings["num_decay_steps"])
    if warmup + decay > total_steps:
        rule = f"does not fit behind {warmup} steps of warm-up: the run has {total_steps} steps"
        raise ConfigError(f"{_KEY}.num_decay_steps = {decay}", rule, f"Use {max(total_steps - warmup, 1)} or fewer")
