"""Learning-rate schedules, with the formulas that Hugging Face users know."""

from __future__ import annotations

import math

from shardwise.spec.run import TrainConfig


def num_warmup_steps(train: TrainConfig, total_steps: int) -> int:
    """Warm-up steps: as given, or the given share of all steps, rounded up."""
    return train.warmup_steps or math.ceil(train.warmup_ratio * total_steps)


def learning_rate(train: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0) of ``total_steps``.

    Linear warm-up from 0; then constant, a straight line to 0, or half a cosine to 0
    (``transformers.get_scheduler`` has the same values).
    """
    warmup = num_warmup_steps(train, total_steps)
    if step < warmup:
        return train.learning_rate * step / max(1, warmup)
    progress = (step - warmup) / max(1, total_steps - warmup)
    if train.lr_scheduler == "constant":
        return train.learning_rate
    if train.lr_scheduler == "cosine":
        return train.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return train.learning_rate * max(0.0, 1.0 - progress)
