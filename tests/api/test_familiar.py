"""Members of Hugging Face's Trainer: those that are there do what they say, the others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise import Callback, Trainer
from shardwise.api.familiar import _ABSENT, Familiar
from shardwise.errors import ConfigError


class _Trainer(Familiar):
    """Without a model: what is asked here needs none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._callbacks = []
        self._session = None if folder is None else SimpleNamespace(run=SimpleNamespace(output_dir=str(folder)))


class _Mine(Callback):
    pass


def test_callbacks_are_added_as_objects_or_classes_before_the_run_begins(tmp_path: Path) -> None:
    trainer, mine = _Trainer(), _Mine()
    trainer.add_callback(mine)
    trainer.add_callback(_Mine)
    assert trainer._callbacks[0] is mine
    assert [type(callback) for callback in trainer._callbacks] == [_Mine, _Mine]
    with pytest.raises(ConfigError, match=r"derived from shardwise\.Callback"):
        trainer.add_callback(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the run has begun"):
        _Trainer(tmp_path).add_callback(mine)


def test_metrics_are_printed_and_written_by_rank_0_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _Trainer(tmp_path)
    monkeypatch.setenv("RANK", "1")
    trainer.log_metrics("train", {"train_loss": 1.5})
    trainer.save_metrics("train", {"train_loss": 1.5})
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("RANK", "0")
    trainer.log_metrics("train", {"train_loss": 1.5, "rows": 8})
    trainer.save_metrics("train", {"train_loss": 1.5})
    trainer.save_metrics("eval", {"eval_loss": 2.0})
    trainer.save_metrics("test", {"other": 3.0}, combined=False)
    trainer.save_state()
    assert capsys.readouterr().out == "train  train_loss = 1.5\ntrain  rows       = 8\n"
    assert json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 2.0}
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"train_loss": 1.5, "eval_loss": 2.0}
    with pytest.raises(ConfigError, match="behind train"):
        _Trainer().save_metrics("train", {})


@pytest.mark.parametrize("name", sorted(_ABSENT))
def test_what_is_absent_is_refused_by_name_when_read_and_when_overridden(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Trainer\.{name}: is not supported: "):
        getattr(_Trainer(), name)
    assert not hasattr(_Trainer(), name)
    with pytest.raises(ConfigError, match=rf"Mine\.{name}: would never be called: "):
        type("Mine", (Trainer,), {name: lambda self, *given: None})


def test_a_subclass_with_methods_of_its_own_is_fine_and_other_names_are_plain_errors() -> None:
    mine: Any = type("Mine", (Trainer,), {"report": lambda self: 1, "state": None})
    assert mine.report(None) == 1
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _Trainer().trian  # noqa: B018
