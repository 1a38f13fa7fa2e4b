"""Every schedule has the values of transformers' own, step by step, also where a run goes on in the middle."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler

from shardwise.spec.run import LrScheduler, LrSchedulerConfig, TrainConfig
from shardwise.train.lr import make_schedule

STEPS, WARMUP, RATE = 20, 4, 0.01
SETTINGS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-3, "power": 2.0},
    "inverse_sqrt": {"timescale": 8},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 6, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
}


def _theirs(name: str, settings: dict[str, Any]) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=RATE)
    # Theirs of the name constant has no warm-up; ours is theirs of the other name.
    scheduler = get_scheduler(name.replace("constant_with_warmup", "constant") + "_with_warmup" * ("constant" in name),
                              optimizer, WARMUP, STEPS, settings)  # fmt: skip
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, SETTINGS.get(name, {})) for name in get_args(LrScheduler)), ("cosine", {"num_cycles": 1.5})],
)
def test_equals_transformers_at_every_step(name: str, settings: dict[str, Any]) -> None:
    train = TrainConfig(
        learning_rate=RATE, lr_scheduler=name, warmup_steps=WARMUP, lr_scheduler_kwargs=LrSchedulerConfig(**settings)
    )
    schedule = make_schedule(train, STEPS)
    assert [schedule(step) for step in range(STEPS)] == pytest.approx(_theirs(name, settings), rel=1e-12, abs=1e-18)
