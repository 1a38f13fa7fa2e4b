"""What a tree says is read whole, or refused with the key, the rule and the nearest thing that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.config import NOT_AVAILABLE, apply_overrides, load_yaml
from shardwise.errors import ConfigError
from shardwise.spec.keys import known_keys
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig, dump_run


def _parse(*overrides: str, **tree: Any) -> RunConfig:
    return parse_run(apply_overrides({"model": "folder", **tree}, overrides))


def _message(*overrides: str, **tree: Any) -> str:
    with pytest.raises(ConfigError) as error:
        _parse(*overrides, **tree)
    return str(error.value)


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"path": "a", "weigth": 3}, ["[1].weigth = 3: unknown key", "[1].weight?"]),
        ({"path": "a", "qqqq": 3}, ["[1].qqqq = 3: unknown key", "path, weight, format, columns"]),
        ({"path": "a", "weight": "x"}, ["[1].weight = 'x'", "number"]),
        ({"path": "a", "format": "mesages"}, ["[1].format = 'mesages'", "messages?"]),
        ({"path": "a", "columns": "b"}, ["[1].columns = 'b'", "{prompt: question"]),
        ({"format": "text"}, ["[1].path: missing"]),
        (3, ["[1] = 3", "path, weight, format, columns"]),
    ],
)
def test_what_is_wrong_inside_a_source_is_refused_there_and_nowhere_else(
    key: str, source: Any, words: list[str]
) -> None:
    message = _message(data={key: ["other.jsonl", source]})
    assert all(part in message for part in words)
    assert f"data.{key}[1]" in message
    assert "Also" not in message


def test_a_source_alone_is_a_list_of_one() -> None:
    alone, listed = (_parse(data={"train": given}).data for given in ({"path": "a"}, [{"path": "a"}]))
    assert alone == listed


# Every key of the contract whose feature is not built yet, with a value that asks for it.
NOT_BUILT = [
    "trust_remote_code=true",
    "cp=2",
    "ep=2",
    "recompute=selective",
]


@pytest.mark.parametrize("override", NOT_BUILT)
def test_a_feature_that_is_not_built_yet_is_refused_by_its_key(override: str) -> None:
    message = _message(override)
    key = override.partition("=")[0].rpartition(".")[2]
    assert NOT_AVAILABLE in message
    assert key in message
    assert "unknown" not in message


def test_several_stages_on_a_rank_and_the_schedule_interleaved_belong_together() -> None:
    assert _parse("schedule=interleaved").strategy.virtual_stages is None
    assert _parse("schedule=interleaved", "virtual_stages=3").strategy.virtual_stages == 3
    assert _parse("virtual_stages=1").strategy.schedule == "1f1b"
    for schedule in ("1f1b", "gpipe"):
        message = _message("virtual_stages=2", f"schedule={schedule}")
        for words in ("strategy.virtual_stages = 2", f"strategy.schedule is {schedule}", "schedule=interleaved"):
            assert words in message
    message = _message("schedule=interleaved", "virtual_stages=1")
    assert "nothing to interleave" in message
    assert "virtual_stages=2, or strategy.schedule=1f1b" in message


def test_neutral_values_of_such_keys_are_accepted() -> None:
    run = _parse("cp=1", "ep=1", "restarts=0", "log.report_to=none", "data.val_size=0")
    assert run.strategy.cp == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("strategy.tpp=2", ["strategy.tpp = 2", "unknown key", "strategy.tp?"]),
        ("tpp=2", ["unknown key", "strategy.tp?"]),
        ("learning_rate=1e-4", ["unknown key", "train.learning_rate?"]),
        ("train.lr=1e-4", ["unknown key", "train.learning_rate?"]),
        ("save.asynch=true", ["unknown key", "save.async?"]),
        ("data.suffle=true", ["unknown key", "data.shuffle?"]),
        ("eval.qqqq=1", ["unknown key", "strategy, steps, batch_size"]),
        ("tp=0", ["strategy.tp = 0", "greater than 0"]),
        ("tp=true", ["strategy.tp = True", "must not be true or false"]),
        ("recompute=true", ["strategy.recompute = True", "must not be true or false"]),
        ("recompute=-1", ["strategy.recompute = -1", "'none'", "or greater than or equal to 0"]),
        ("stages=4,3", ["strategy.stages = '4,3'", "list", "[4, 3]"]),
        ("stages=[4, 0]", ["strategy.stages[1] = 0", "greater than 0"]),
        ("device=gpu", ["device = 'gpu'", "mean cuda?"]),
        ("device=Ascend", ["device = 'Ascend'", "mean npu?"]),
        ("train.optimizer=adam", ["train.optimizer = 'adam'", "'adamw' or 'sgd'", "mean adamw?"]),
        ("train.learning_rate=.nan", ["train.learning_rate = nan", "finite"]),
        ("train.learning_rate=-1", ["train.learning_rate = -1", "0"]),
        ("train.learning_rate=fast", ["train.learning_rate = 'fast'", "number"]),
        ("train.epochs=1.5", ["train.epochs = 1.5", "integer"]),
        ("train=3", ["train = 3", "section", "learning_rate"]),
        ("output_dir=3", ["output_dir = 3", "text", "'3'"]),
        ("device=gpu", ["device = 'gpu'", "'cuda'"]),
        ("train.warmup_ratio=2", ["train.warmup_ratio = 2", "1"]),
        ("data.format=shargpt", ["data.format = 'shargpt'", "sharegpt?"]),
        ("data.columns.promt=q", ["data.columns = {promt: q}", "no name of a column", "prompt?"]),
        ("data.train=[{path: a, columns: {x: q}}]", ["columns of a in data.train"]),
        ("data.chat_template_kwargs.tokenize=true", ["{tokenize: True}", "not for a run to say"]),
        ("data.train=[]", ["data.train = []", "no source"]),
        ("data.train=[{path: a, weight: 1}, b]", ["weights [1.0, None]", "all sources"]),
        ("data.train=[{path: a, wieght: 1}]", ["data.train[0]", "unknown key"]),
        ("data.eval=[{path: a, weight: 1}]", ["data.eval with weights"]),
        ("data.val_size=1.5", ["data.val_size = 1.5", "whole number", "data.val_size=1"]),
    ],
)
def test_a_wrong_value_names_key_rule_and_remedy(override: str, words: list[str]) -> None:
    message = _message(override)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.epochs=2", "train.max_steps=5"], ["train.epochs = 2", "train.max_steps = 5"]),
        (["train.warmup_steps=2", "train.warmup_ratio=0.1"], ["warmup_steps = 2", "warmup_ratio = 0.1"]),
        (["train.global_batch_size=8", "train.gradient_accumulation_steps=2"], ["global_batch_size = 8", "= 2"]),
        (["train.gradient_accumulation_steps=2"], ["needs strategy.micro_batch_size"]),
        (["save.strategy=steps"], ["needs save.steps"]),
        (["save.steps=2"], ["save.steps = 2", "save.strategy is no"]),
        (["eval.strategy=steps", "data.eval=x"], ["needs eval.steps"]),
        (["data.on_long=split", "data.max_length=1"], ["data.on_long = split", "data.max_length=2"]),
        (["eval.strategy=epoch"], ["data.eval"]),
        (["train.momentum=0.9"], ["momentum", "sgd"]),
        (["train.optimizer=sgd", "train.adam_beta1=0.5"], ["adam_beta1", "adamw"]),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], words: list[str]) -> None:
    message = _message(*overrides)
    for word in words:
        assert word in message


def test_all_that_is_wrong_is_said_in_one_message() -> None:
    message = _message("tp=0", "train.epochs=0", "train.sede=1")
    assert "\n" not in message
    for word in ("strategy.tp = 0", "train.epochs = 0", "train.sede = 1", "train.seed?"):
        assert word in message


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigError, match="model: missing"):
        parse_run({})


def test_an_empty_section_means_its_defaults_and_a_false_no_means_no() -> None:
    run = parse_run(
        {"model": "m", "data": None, "train": None, "save": {"strategy": False, "best": False}, "resume": False}
    )
    assert run == RunConfig(model="m")


def test_a_dumped_run_reads_back_equal_with_the_names_of_the_contract(tmp_path: Path) -> None:
    run = _parse(
        "stages=[2, 2]", "pp=2", "train.learning_rate=1e-4", "save.keep=1", "output_dir='1e5'", "tokenizer='no'"
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(run), encoding="utf-8")
    assert parse_run(load_yaml(path)) == run
    assert "async" in load_yaml(path)["save"]


EVALUATED = ("save.strategy=steps", "save.steps=4", "data.eval=f", "eval.strategy=steps")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("save.async=true",), ["save.async = true", "save.strategy is no"]),
        (("save.best=loss", *EVALUATED, "eval.steps=2"), ["save.best = 'loss'", "eval_loss?"]),
        (("save.best=eval_loss",), ["save.strategy is no"]),
        (("save.best=eval_loss", "save.strategy=epoch"), ["eval.strategy is no"]),
        (("save.best=eval_loss", *EVALUATED, "eval.steps=3"), ["save 4 and eval 3", "multiple of eval.steps"]),
    ],
)
def test_saving_that_cannot_be(overrides: tuple[str, ...], words: list[str]) -> None:
    message = _message(*overrides)
    assert all(word in message for word in words), message


def test_the_best_of_checkpoints_that_are_evaluated() -> None:
    run = _parse("save.best=eval_loss", *EVALUATED, "eval.steps=2", "save.async=true", "restarts=3")
    assert (run.save.best, run.save.async_, run.restarts) == ("eval_loss", True, 3)


def test_every_key_of_the_contract_is_known() -> None:
    keys = set(known_keys())
    assert {"save.async", "data.on_long", "strategy.stages", "train.adam_eps", "log.rows", "rdzv_endpoint"} <= keys
    assert not any("async_" in key for key in keys)
