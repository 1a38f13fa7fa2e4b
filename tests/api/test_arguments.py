"""``TrainingArguments``: every field of Hugging Face's is in one of three lists, and does what its list says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.api.ambient import AMBIENT
from shardwise.api.arguments import TrainingArguments, own_names
from shardwise.api.auto import ModelHandle
from shardwise.api.fields import HARMLESS, HONOURED, REFUSED
from shardwise.api.trainer import Trainer
from shardwise.errors import ConfigError
from shardwise.launch.place import PRESETS
from shardwise.spec.keys import known_keys
from shardwise.spec.rules import parse_run


def tree(batch_size: int | None = None, micro_batch_num: int | None = None, **given: Any) -> dict[str, Any]:
    return TrainingArguments(**given).tree_for(batch_size=batch_size, micro_batch_num=micro_batch_num)


def test_every_field_of_hugging_face_is_in_one_list() -> None:
    import dataclasses

    from transformers import TrainingArguments as HuggingFace

    lists = (HONOURED, HARMLESS, REFUSED)
    for field in dataclasses.fields(HuggingFace):
        assert sum(field.name in names for names in lists) == 1, field.name


def test_honoured_fields_set_keys_that_exist() -> None:
    assert {key for key in HONOURED.values() if key is not None} <= set(known_keys())
    assert set(own_names().values()) <= set(known_keys())


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_accepted_at_its_neutral_values_alone(name: str) -> None:
    reason, neutral = REFUSED[name]
    assert tree(**{name: neutral[0]}) == {}
    with pytest.raises(ConfigError) as error:
        TrainingArguments(**{name: "something"})
    assert name in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_field_says_why_it_has_no_effect(name: str) -> None:
    args = TrainingArguments(**{name: 1})
    assert args.tree == {}
    assert args.notes == [f"{name} has no effect: {HARMLESS[name]}"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"output_dir": "here", "seed": 3, "data_seed": 4}, {"output_dir": "here", "train.seed": 3, "data.seed": 4}),
        ({"learning_rate": 1e-3, "adam_epsilon": 1e-6}, {"train.learning_rate": 1e-3, "train.adam_eps": 1e-6}),
        ({"optim": "adamw_torch_fused"}, {"train.optimizer": "adamw"}),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}, {"train.warmup_steps": 2}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}'},
            {"train.lr_scheduler": "cosine_with_min_lr", "train.lr_scheduler_kwargs.min_lr_rate": 0.1},
        ),
        (
            {"load_best_model_at_end": True, "metric_for_best_model": "loss"},
            {"save.best": "eval_loss", "save.export": "best"},
        ),
        ({"load_best_model_at_end": False, "metric_for_best_model": "eval_loss"}, {}),
        ({"warmup_steps": 0.1}, {"train.warmup_ratio": 0.1}),
        ({"epochs": 2}, {"train.epochs": 2}),
        ({"num_train_epochs": 2.0}, {"train.epochs": 2}),
        ({"num_train_epochs": 2.0, "max_steps": -1}, {"train.epochs": 2}),
        ({"num_train_epochs": 2.0, "max_steps": 9}, {"train.max_steps": 9}),
        ({"bf16": True}, {"train.precision": "bf16"}),
        ({"gradient_checkpointing": True}, {"strategy.recompute": "full"}),
        ({"save_strategy": "epoch", "save_total_limit": 2}, {"save.strategy": "epoch", "save.keep": 2}),
        ({"save_strategy": "steps"}, {"save.strategy": "steps", "save.steps": 500}),
        ({"save_steps": 7}, {"save.strategy": "steps", "save.steps": 7}),
        ({"eval_strategy": "steps", "logging_steps": 5}, {"eval.strategy": "steps", "eval.steps": 5, "log.steps": 5}),
        ({"use_cpu": True}, {"device": "cpu"}),
        ({"train_sampling_strategy": "sequential"}, {"data.shuffle": False}),
        (
            {"train_sampling_strategy": "group_by_length"},
            {"data.shuffle": True, "data.group_by_length": True},
        ),
        ({"resume_from_checkpoint": True}, {"resume": "auto"}),
        ({"pp": 2, "tp": 2, "max_length": 9}, {"strategy.pp": 2, "strategy.tp": 2, "data.max_length": 9}),
        ({"log.rows": True}, {"log.rows": True}),
        ({"use_lora": True}, {"use_lora": True}),
    ],
)
def test_what_a_field_sets(given: dict[str, Any], expected: dict[str, Any]) -> None:
    made = tree(**given)
    for dotted, value in expected.items():
        place: Any = made
        for part in dotted.split("."):
            place = place[part]
        assert place == value, dotted


@pytest.mark.parametrize(
    ("given", "micro_batch", "accumulation"),
    [
        ({"per_device_train_batch_size": 2}, 2, 1),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 2, 4),
        ({"batch_size": 2, "micro_batch_num": 4}, 2, 4),
        ({"gradient_accumulation_steps": 2}, 8, 2),  # Hugging Face's default of 8 rows
        ({"batch_size": 4, "gradient_accumulation_steps": 3, "micro_batch_size": 2}, 2, 6),
    ],
)
def test_the_batch_of_a_device(given: dict[str, Any], micro_batch: int, accumulation: int) -> None:
    run = parse_run({"model": "m", **tree(**given)})
    assert run.strategy.micro_batch_size == micro_batch
    assert run.train.gradient_accumulation_steps == accumulation


@pytest.mark.parametrize(
    ("rows", "accumulation", "num_stages", "micro_batch"),
    [
        (8, 1, 1, 8),
        (8, 1, 2, 2),  # the default for 8 rows: twice as many micro-batches as stages
        (8, 1, 4, 1),
        (6, 2, 4, 1),
        (4, 4, 4, 4),  # as many micro-batches as stages: what was given stays
        (2, 8, 4, 2),
        (1, 2, 4, 1),  # fewer rows than stages: none can be left for the others
        (3, 5, 6, 1),
    ],
)
def test_a_pipeline_gets_no_empty_micro_batch_where_the_rows_allow_it(
    rows: int, accumulation: int, num_stages: int, micro_batch: int
) -> None:
    args = TrainingArguments(per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation)
    run = parse_run({"model": "m", **args.tree_for(num_stages=num_stages)})
    assert (run.strategy.micro_batch_size, run.train.gradient_accumulation_steps) == (
        micro_batch,
        rows * accumulation // micro_batch,
    )
    assert run.train.gradient_accumulation_steps >= min(num_stages, rows * accumulation)


def test_a_micro_batch_that_was_given_stays() -> None:
    args = TrainingArguments(per_device_train_batch_size=8, micro_batch_size=8)
    assert args.tree_for(num_stages=4)["strategy"]["micro_batch_size"] == 8


@pytest.mark.parametrize(
    ("strategy", "arguments", "preset", "micro_batch"),
    [
        ({}, {}, [], 8),
        ({"pp": 2}, {}, [], 2),
        ({"stages": [1, 1]}, {}, [], 2),
        ({}, {"pp": 2}, [], 2),
        ({"pp": 2}, {}, ["pp=1"], 8),
        ({}, {}, ["strategy.pp=4"], 1),
        ({"pp": "two"}, {}, [], 8),  # refused by its own rule
    ],
)
def test_a_trainer_knows_its_stages_whoever_has_given_them(
    strategy: dict[str, Any],
    arguments: dict[str, Any],
    preset: list[str],
    micro_batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.api.trainer.contact", lambda count, devices: None)
    monkeypatch.setattr("shardwise.api.trainer.parse_run", lambda tree: SimpleNamespace(devices=None))
    monkeypatch.setenv(PRESETS, json.dumps(preset))
    args = TrainingArguments(per_device_train_batch_size=8, **arguments)
    trainer = Trainer(ModelHandle("m", Path("m")), args, train_dataset=[{}], strategy=strategy)
    assert trainer._tree()["strategy"]["micro_batch_size"] == micro_batch


def test_no_batch_leaves_the_default_of_the_contract() -> None:
    assert tree() == {}


def test_the_batch_of_the_data_set_and_the_context_count_too() -> None:
    made = tree(batch_size=2, micro_batch_num=4)
    assert (made["strategy"]["micro_batch_size"], made["train"]["gradient_accumulation_steps"]) == (2, 4)
    with pytest.raises(ConfigError, match=r"batch_size = 4 and train_dataset.batch = 2: must be equal"):
        TrainingArguments(batch_size=4).tree_for(batch_size=2)
    with pytest.raises(ConfigError, match="micro_batch_num = 8: must be equal"):
        TrainingArguments(gradient_accumulation_steps=4).tree_for(micro_batch_num=8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rat": 1}, ["unknown argument", "learning_rate?"]),
        ({"num_train_epochs": 1.5}, ["whole number", "max_steps"]),
        ({"optim": "adafactor"}, ["adafactor", "adamw_torch"]),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["reduce_lr_on_plateau", "cosine", "polynomial"]),
        ({"metric_for_best_model": "accuracy"}, ["accuracy", "metric_for_best_model='eval_loss'"]),
        ({"greater_is_better": True}, ["greater_is_better", "lowest eval_loss"]),
        ({"lr_scheduler_kwargs": "min_lr"}, ["lr_scheduler_kwargs = 'min_lr'", "no mapping"]),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, ["constant_with_warmup"]),
        ({"logging_steps": 0.5}, ["logging_steps", "whole number"]),
        ({"batch_size": 2, "per_device_train_batch_size": 4}, ["names for the same thing"]),
        ({"batch_size": 0}, ["batch_size = 0", "above 0"]),
        ({"batch_size": 2, "global_batch_size": 8}, ["two ways"]),
        ({"batch_size": 3, "micro_batch_size": 2}, ["does not divide", "Use 1"]),
        ({"eval_strategy": "epoch", "evaluation_strategy": "steps"}, ["two names"]),
    ],
)
def test_what_is_refused(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        TrainingArguments(**given).tree_for()
    for word in words:
        assert word in str(error.value)


def test_an_enumeration_counts_as_its_value() -> None:
    from transformers.trainer_utils import SaveStrategy

    assert tree(save_strategy=SaveStrategy.EPOCH) == {"save": {"strategy": "epoch"}}


@pytest.mark.parametrize("given", [{"max_steps": "5"}, {"epochs": "2"}, {"logging_steps": "1"}, {"max_steps": 2.5}])
def test_a_number_that_is_none_is_refused_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"{name} = .*must be a whole number"):
        TrainingArguments(**given)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """One of MindFormers' task, in a process that starts nothing."""
    monkeypatch.setattr("shardwise.api.trainer.contact", lambda count, devices: None)
    args = TrainingArguments(batch_size=2)
    more: dict[str, Any] = {"task": "text_generation"}
    return Trainer(ModelHandle("m", Path("m")), args, train_dataset=[{}], strategy={"tp": 2}, **more)


def test_a_parallel_config_is_the_strategy_of_its_trainer(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.set_parallel_config(data_parallel=2, model_parallel=2, pipeline_stage=2, micro_batch_num=4)
    trainer.set_parallel_config(vocab_emb_dp=True)
    assert "vocab_emb_dp = True: no effect" in capsys.readouterr().err
    found = trainer._tree()
    assert found["strategy"] == {"dp": 2, "tp": 2, "pp": 2, "micro_batch_size": 2}
    assert found["train"]["gradient_accumulation_steps"] == 4


def test_a_parallel_config_that_does_not_fit_is_refused(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"set_parallel_config = 4 and strategy\.tp = 2"):
        trainer.set_parallel_config(model_parallel=4)
    with pytest.raises(ConfigError, match=r"Did you mean parallel_config\.model_parallel\?"):
        trainer.set_parallel_config(model_paralel=4)
    for wrong in (0, -1, True, "4"):
        with pytest.raises(ConfigError, match=r"micro_batch_num=.*must be a whole number above 0"):
            trainer.set_parallel_config(micro_batch_num=wrong)
    monkeypatch.setattr(AMBIENT, "micro_batch_num", 8)
    with pytest.raises(ConfigError, match=r"micro_batch_num=4\): the context says micro_batch_num = 8"):
        trainer.set_parallel_config(micro_batch_num=4)
    monkeypatch.setattr(trainer, "_checked", True)
    with pytest.raises(ConfigError, match="has proven another split"):
        trainer.set_parallel_config(data_parallel=2)
    monkeypatch.setattr(trainer, "_session", object())
    with pytest.raises(ConfigError, match="the model has been loaded before"):
        trainer.set_parallel_config(data_parallel=2)


def test_finetune_is_train_and_begins_with_the_weights_of_the_model(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "train", lambda resume: ("trained", resume))
    assert trainer.finetune(False, resume_training=True) == ("trained", True)
    with pytest.raises(ConfigError, match=r"finetune_checkpoint = 'x\.ckpt'"):
        trainer.finetune("x.ckpt")
    with pytest.raises(ConfigError, match=r"Trainer\(task='image_classification'\): must be 'text_generation'"):
        Trainer(trainer.model, task="image_classification")
