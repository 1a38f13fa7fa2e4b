"""Callbacks that stand for keys of ``run.yaml``, and MindSpore's names that are refused with what serves instead."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import shardwise.mindspore as ms
from shardwise import Trainer, TrainingArguments
from shardwise.api.auto import ModelHandle
from shardwise.errors import ConfigError
from shardwise.mindspore.absent import ABSENT
from shardwise.mindspore.train import CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor
from shardwise.mindspore.train.callback import _NO_EFFECT, _REFUSED


def tree(monkeypatch: pytest.MonkeyPatch, *callbacks: Any, **arguments: Any) -> dict[str, Any]:
    monkeypatch.setattr("shardwise.api.trainer.contact", lambda count, devices: None)
    args = TrainingArguments(**arguments)
    return Trainer(ModelHandle("m", Path("m")), args, train_dataset=[{}], callbacks=callbacks)._tree()


def test_callbacks_set_the_keys_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    saving = ModelCheckpoint(config=CheckpointConfig(save_checkpoint_steps=20, keep_checkpoint_max=2, async_save=True))
    found = tree(monkeypatch, LossMonitor(5), TimeMonitor(), saving)
    assert found["log"] == {"steps": 5}
    assert found["save"] == {"strategy": "steps", "steps": 20, "keep": 2, "async": True}


def test_a_callback_and_an_argument_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree(monkeypatch, LossMonitor(5), logging_steps=5)["log"] == {"steps": 5}
    with pytest.raises(ConfigError, match=r"LossMonitor = 5 and log\.steps = 7"):
        tree(monkeypatch, LossMonitor(5), logging_steps=7)
    with pytest.raises(ConfigError, match=r"ModelCheckpoint = 'steps' and save\.strategy = 'epoch'"):
        tree(monkeypatch, ModelCheckpoint(), save_strategy="epoch")


@pytest.mark.parametrize("name", _NO_EFFECT)
def test_an_argument_of_a_checkpoint_without_effect_says_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert CheckpointConfig(**{name: True}).keys == CheckpointConfig().keys
    assert capsys.readouterr().err == f"CheckpointConfig({name}=True) has no effect: {_NO_EFFECT[name]}\n"


def test_names_and_intervals_without_effect_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert LossMonitor(0).keys_given == TimeMonitor(10, data_time=True).keys_given == {}
    ModelCheckpoint("mine", "here")
    told = capsys.readouterr().err
    for word in ("per_print_times=0", "data_size=10", "data_time=True", "prefix='mine'", "directory='here'"):
        assert f"{word}) has no effect: " in told
    ModelCheckpoint()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", _REFUSED)
def test_what_would_change_the_checkpoints_is_refused(name: str) -> None:
    for nothing in (0, None):
        assert CheckpointConfig(**{name: nothing}).keys == CheckpointConfig().keys
    with pytest.raises(ConfigError, match=_REFUSED[name]):
        CheckpointConfig(**{name: 3})


def test_arguments_without_names_come_in_the_order_of_mindspore() -> None:
    keys = CheckpointConfig(20, 0, 3, 0, True, True).keys
    assert keys == {"save.strategy": "steps", "save.steps": 20, "save.keep": 3, "save.async": True}
    with pytest.raises(ConfigError, match="after a number of steps"):
        CheckpointConfig(20, 600)
    with pytest.raises(ConfigError, match="given twice: 20 by its place, 30 by its name"):
        CheckpointConfig(20, save_checkpoint_steps=30)
    with pytest.raises(ConfigError, match="at most 14"):
        CheckpointConfig(*range(15))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CheckpointConfig(save_steps=3), ["unknown argument", "save_checkpoint_steps?"]),
        (lambda: CheckpointConfig(save_checkpoint_steps=0), ["save_checkpoint_steps = 0", "above 0"]),
        (lambda: LossMonitor(-1), ["per_print_times = -1"]),
        (lambda: ModelCheckpoint(config={"steps": 3}), ["type dict", "CheckpointConfig"]),
    ],
)
def test_what_a_callback_refuses(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "module", ["", ".train", ".train.callback", ".dataset", ".communication", ".communication.management"]
)
def test_a_name_of_mindspore_is_refused_with_what_serves_instead(module: str) -> None:
    place = importlib.import_module(f"shardwise.mindspore{module}")
    for name, instead in ABSENT.items():
        with pytest.raises(ConfigError) as error:
            getattr(place, name)
        assert str(error.value).endswith(f".{name}: is not there: {instead}")
        assert not hasattr(place, name)


def test_an_import_of_such_a_name_is_refused_and_another_fails_as_ever() -> None:
    with pytest.raises(ConfigError, match=r"AutoModel\.from_pretrained"):
        exec("from shardwise.mindspore import nn")
    with pytest.raises(ConfigError, match=r"derive from shardwise\.Callback"):
        exec("from shardwise.mindspore.train.callback import RunContext")
    with pytest.raises(ImportError, match="cannot import name 'nnn'"):
        exec("from shardwise.mindspore import nnn")
    assert not hasattr(ms, "nnn")
