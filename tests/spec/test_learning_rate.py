"""Settings of schedules: what belongs to which, and what must be given, said before anything starts."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from shardwise.config import load_yaml
from shardwise.errors import ConfigError
from shardwise.spec.learning_rate import SETTINGS, check_schedule_length
from shardwise.spec.rules import parse_run
from shardwise.spec.run import LrScheduler, LrSchedulerConfig, RunConfig, TrainConfig, dump_run


def _run(**train: Any) -> RunConfig:
    return parse_run({"model": "m", "data": {"train": "f"}, "train": train})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("polynomial", {"power": 2}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "cosine"}),
    ],
)
def test_settings_are_kept_in_a_resolved_run(name: str, settings: dict[str, Any], tmp_path: Any) -> None:
    run = _run(lr_scheduler=name, lr_scheduler_kwargs=settings)
    (tmp_path / "run.yaml").write_text(dump_run(run), encoding="utf-8")
    assert parse_run(load_yaml(tmp_path / "run.yaml")) == run


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"lr_scheduler": "linear", "lr_scheduler_kwargs": {"power": 2}}, ["power = 2", "polynomial", "no settings"]),
        ({"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"min_lr": 0}}, ["cosine_with_min_lr", "num_cycles"]),
        ({"lr_scheduler": "cosine", "lr_scheduler_kwargs": {"num_cycle": 1}}, ["unknown key", "num_cycles?"]),
        ({"lr_scheduler": "cosine_with_min_lr"}, ["least learning rate", "min_lr_rate=0.1"]),
        (
            {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6, "min_lr_rate": 0.1}},
            ["Give one of them"],
        ),
        (
            {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1.0}},
            ["min_lr = 1.0", "below train.learning_rate", "min_lr=5e-06"],
        ),
        ({"lr_scheduler": "polynomial", "learning_rate": 1e-8}, ["lr_end = 1e-07", "lr_end=1e-09"]),
        ({"lr_scheduler": "warmup_stable_decay"}, ["num_decay_steps=100"]),
        (
            {
                "lr_scheduler": "warmup_stable_decay",
                "max_steps": 10,
                "warmup_steps": 4,
                "lr_scheduler_kwargs": {"num_decay_steps": 7},
            },
            ["num_decay_steps = 7", "4 steps of warm-up", "Use 6 or fewer"],
        ),
        ({"lr_scheduler": "polynomal"}, ["Did you mean polynomial?"]),
    ],
)
def test_what_does_not_fit_is_refused(train: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        _run(**train)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_decay_is_held_against_the_steps_of_the_run() -> None:
    settings = LrSchedulerConfig(num_decay_steps=7)
    train = TrainConfig(lr_scheduler="warmup_stable_decay", warmup_ratio=0.25, lr_scheduler_kwargs=settings)
    check_schedule_length(train, 10)
    with pytest.raises(ConfigError, match="Use 6 or fewer"):
        check_schedule_length(train, 9)


def test_every_schedule_says_what_settings_it_has() -> None:
    assert set(SETTINGS) == set(get_args(LrScheduler))
    assert {setting for each in SETTINGS.values() for setting in each} == set(LrSchedulerConfig.model_fields)
