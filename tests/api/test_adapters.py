"""PEFT's configuration as keys of ours: the same adapter, or a refusal that names the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from shardwise import Trainer, TrainingArguments
from shardwise.api.adapters import lora_keys
from shardwise.errors import ConfigError
from shardwise.spec.rules import parse_run
from tests.spec.model_folder import make_folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"target_modules": "all-linear"}, {"r": 8, "alpha": 8, "target_modules": "all-linear"}),
        (
            {"r": 4, "lora_alpha": 32, "lora_dropout": 0.1, "target_modules": ["v_proj", "q_proj"]},
            {"r": 4, "alpha": 32, "dropout": 0.1, "target_modules": ("q_proj", "v_proj")},
        ),
        (
            {"target_modules": r".*layers\.0\..*", "modules_to_save": ["lm_head"], "task_type": "CAUSAL_LM"},
            {"target_modules": r".*layers\.0\..*", "modules_to_save": ("lm_head",)},
        ),
    ],
)
def test_settings_become_keys(given: dict[str, Any], expected: dict[str, Any]) -> None:
    run = parse_run({"model": "m", "data": {"train": "f"}, "lora": lora_keys(LoraConfig(**given))})
    assert run.lora is not None
    assert {key: getattr(run.lora, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["target_modules", "all-linear"]),
        ({"use_dora": True}, ["use_dora = True", "plain LoRA"]),
        ({"bias": "all"}, ["bias = 'all'"]),
        ({"rank_pattern": {"q_proj": 4}}, ["rank_pattern"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights = 'pissa'"]),
        ({"layers_to_transform": [0]}, ["layers_to_transform = [0]"]),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(given: dict[str, Any], words: list[str]) -> None:
    config = LoraConfig(**({"target_modules": ["q_proj"]} if given else {}) | given)
    with pytest.raises(ConfigError) as refusal:
        lora_keys(config)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_rank_stabilised_scale_is_the_one_of_peft() -> None:
    given: dict[str, Any] = {"target_modules": ["0"], "r": 3, "lora_alpha": 7}
    keys = lora_keys(LoraConfig(use_rslora=True, **given))
    stabilised = get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(use_rslora=True, **given))
    plain = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(**(given | {"lora_alpha": keys["alpha"]}))
    )
    scales = [model.base_model.model[0].scaling["default"] for model in (stabilised, plain)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-15)


def test_none_asks_for_nothing() -> None:
    given = {"bias": None, "rank_pattern": None, "use_dora": None}
    assert lora_keys(LoraConfig(target_modules=["q_proj"], **given)) == lora_keys(LoraConfig(target_modules=["q_proj"]))


def test_another_kind_of_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"IA3Config: is not supported.*peft\.LoraConfig"):
        lora_keys(IA3Config(target_modules=["q_proj"], feedforward_modules=[]))


def test_a_trainer_takes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardwise.api.trainer.contact", lambda *_: None)  # no job is started
    trainer = Trainer(make_folder(tmp_path / "model"), peft_config=LoraConfig(r=4, target_modules="all-linear"))
    assert trainer._tree()["lora"] == {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
    both = TrainingArguments(lora={"r": 2})
    with pytest.raises(ConfigError, match=r"Trainer\(peft_config\)"):
        Trainer(make_folder(tmp_path / "other"), both, peft_config=LoraConfig(r=4, target_modules="all-linear"))
