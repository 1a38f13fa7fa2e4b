"""Learning-rate schedules, with the formulas that Hugging Face users know."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from shardwise.spec.learning_rate import given_settings, num_warmup_steps
from shardwise.spec.run import TrainConfig

Schedule = Callable[[int], float]  # step, from 0 -> learning rate


def make_schedule(train: TrainConfig, total_steps: int) -> Schedule:
    """The learning rate of each step of a run of ``total_steps``.

    Linear warm-up from 0; then constant, a straight line to 0, or half a cosine to 0
    (``transformers.get_scheduler`` has the same values). The other schedules are transformers' own.
    """
    if train.lr_scheduler in ("linear", "cosine", "constant", "constant_with_warmup") and not given_settings(train):
        return lambda step: _usual(train, step, total_steps)
    from transformers import get_scheduler  # loads its optimizers, which the usual schedules do not need

    optimizer = torch.optim.SGD([torch.zeros(())], lr=train.learning_rate)
    warmup = num_warmup_steps(train, total_steps)
    scheduler = get_scheduler(train.lr_scheduler, optimizer, warmup, total_steps, given_settings(train))
    (factor,) = scheduler.lr_lambdas
    return lambda step: train.learning_rate * float(factor(step))


def learning_rate(train: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``."""
    return make_schedule(train, total_steps)(step)


def _usual(train: TrainConfig, step: int, total_steps: int) -> float:
    warmup = num_warmup_steps(train, total_steps)
    if step < warmup:
        return train.learning_rate * step / max(1, warmup)
    progress = (step - warmup) / max(1, total_steps - warmup)
    if train.lr_scheduler == "cosine":
        return train.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    if train.lr_scheduler == "linear":
        return train.learning_rate * max(0.0, 1.0 - progress)
    return train.learning_rate
