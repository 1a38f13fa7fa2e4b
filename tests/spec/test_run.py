"""The classes hold what was said, unchanged and unchangeable, with the defaults of the contract."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shardwise.spec.keys import get, known_keys
from shardwise.spec.run import LoraConfig, RunConfig, SaveConfig, StrategyConfig, dump_run

DEFAULTS: dict[str, Any] = {
    "model_init": "pretrained",
    "trust_remote_code": False,
    "data.on_long": "refuse",
    "data.packing": False,
    "data.shuffle": True,
    "data.drop_last": False,
    "data.on_bad_rows": "refuse",
    "train.optimizer": "adamw",
    "train.learning_rate": 5e-5,
    "train.lr_scheduler": "linear",
    "train.warmup_steps": 0,
    "train.warmup_ratio": 0.0,
    "train.weight_decay": 0.0,
    "train.adam_beta1": 0.9,
    "train.adam_beta2": 0.999,
    "train.adam_eps": 1e-8,
    "train.momentum": 0.0,
    "train.max_grad_norm": 1.0,
    "train.seed": 42,
    "train.on_nan": "stop",
    "strategy.schedule": "1f1b",
    "strategy.recompute": "none",
    "save.strategy": "no",
    "save.keep": 3,
    "save.export": True,
    "save.grace_seconds": 600.0,
    "eval.strategy": "no",
    "log.steps": 1,
    "log.rows": False,
    "resume": "no",
    "restarts": 0,
    "use_lora": False,
    "device": "auto",
}


@pytest.mark.parametrize("key", DEFAULTS)
def test_defaults_are_those_of_the_contract(key: str) -> None:
    assert get(RunConfig(model="m"), key) == DEFAULTS[key]


def test_the_defaults_of_lora_are_those_of_the_contract() -> None:
    lora = LoraConfig()
    assert (lora.r, lora.alpha, lora.dropout, lora.target_modules) == (8, 16.0, 0.0, None)


def test_a_run_cannot_be_changed_and_every_key_can_be_read() -> None:
    run = RunConfig(model="m")
    with pytest.raises(ValidationError, match="frozen"):
        run.model = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        run.train.seed = 1  # type: ignore[misc]
    for key in known_keys():
        if not key.startswith(("lora.", "train.lr_scheduler_kwargs.")):  # sections that are None
            get(run, key)


@pytest.mark.parametrize("value", [True, 0, -1, 1.5, "x", [2]])
def test_a_degree_is_a_whole_number_above_0(value: Any) -> None:
    with pytest.raises(ValidationError):
        StrategyConfig(tp=value)


def test_false_reads_as_no_only_where_no_is_the_default() -> None:
    assert SaveConfig.model_validate({"strategy": False, "best": False}) == SaveConfig()
    for wrong in ({"strategy": True}, {"keep": False}, {"steps": False}):
        with pytest.raises(ValidationError, match="must not be true or false"):
            SaveConfig.model_validate(wrong)


def test_a_dump_is_readable_and_spelt_as_the_contract_spells_it() -> None:
    text = dump_run(RunConfig(model="模型", strategy=StrategyConfig(stages=(2, 2))))
    assert "model: 模型\n" in text
    assert "async: false" in text
    assert "async_" not in text
    assert "tuple" not in text
