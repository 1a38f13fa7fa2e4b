"""Callbacks under a split model: which hooks, on which ranks, in which order; how one stops or fails a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.spec.flops import step_flops
from shardwise.spec.plan import Plan
from shardwise.train.callbacks import Callback, RunInfo
from tests.fixtures import make_rows
from tests.train.runs import make_inputs, run

pytestmark = pytest.mark.slow
BASE = ["data.shuffle=false", "train.global_batch_size=4", "train.optimizer=sgd"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


class Recorder(Callback):
    """Notes each call; sums a gradient-free collective at each step, which only all ranks together can."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_train_begin(self, info: RunInfo) -> None:
        self.notes.append(f"begin {info.first_step} {info.total_steps} of {info.world_size}")

    def on_step_begin(self, step: int) -> None:
        self.notes.append(f"before {step}")

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        assert metrics["step"] == step
        self.notes.append(f"after {step} {metrics['loss']}")

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        self.notes.append(f"evaluated {metrics['step']} {metrics['eval_loss']}")

    def on_epoch_end(self, epoch: int) -> None:
        self.notes.append(f"epoch {epoch}")

    def on_save(self, path: Path) -> None:
        assert path.is_dir()
        self.notes.append(f"saved {path.name}")

    def on_train_end(self, reason: str | None) -> None:
        self.notes.append(f"end {reason}")

    def on_exception(self, error: BaseException) -> None:
        self.notes.append(f"failed {type(error).__name__}")


class Collective(Recorder):
    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        total = torch.ones(1)
        dist.all_reduce(total)
        self.notes.append(f"{int(total)} ranks")


class OnMain(Recorder):
    main_only = True


def _recorders(rank: int) -> list[Callback]:
    return [Recorder(), OnMain(), Collective()]


def test_hooks_come_in_order_on_every_rank_or_on_the_first(inputs: Path, tmp_path: Path) -> None:
    evaluation = [f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=epoch", "save.strategy=epoch"]
    result = run(inputs, tmp_path / "out", [*BASE, "pp=2", "train.epochs=2", *evaluation], _recorders)
    assert result.errors == ["", ""]
    losses = [line["loss"] for line in result.metrics()]
    evals = [line["eval_loss"] for line in result.metrics("eval")]
    expected = ["begin 0 4 of 2"]
    for epoch in range(2):
        for step in (2 * epoch + 1, 2 * epoch + 2):
            expected += [f"before {step}", f"after {step} {losses[step - 1]}"]
        step = 2 * epoch + 2
        expected += [f"evaluated {step} {evals[epoch]}", f"epoch {epoch}", f"saved step-{step:08d}"]
    expected.append("end None")
    everywhere, main, collective = zip(*result.callbacks, strict=True)
    assert everywhere == (expected, expected)
    assert main == (expected, [])
    assert collective[0].count("2 ranks") == collective[1].count("2 ranks") == 4


class StopsOnRank1(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.rank == 1 and step == 2:
            self.stop("enough, says rank 1")


def _stopping(rank: int) -> list[Callback]:
    return [StopsOnRank1(rank), Recorder()]


@pytest.mark.parametrize("saves", [True, False])
def test_one_rank_ends_the_run_for_all_in_good_order(inputs: Path, tmp_path: Path, saves: bool) -> None:
    saving = ["save.strategy=steps", "save.steps=100"] if saves else []
    result = run(inputs, tmp_path / "out", [*BASE, "tp=2", "train.max_steps=9", *saving], _stopping)
    assert result.errors == ["", ""]
    assert result.returned == [{}, {}]
    assert [line["step"] for line in result.metrics()] == [1, 2]
    assert (result.status().step, result.status().reason) == (2, "enough, says rank 1")
    assert result.status().checkpoint == ("checkpoints/step-00000002" if saves else None)
    assert "ended: enough, says rank 1" in result.terminal
    assert (result.output_dir / "export" / "model.safetensors").is_file()
    assert [notes[1][-1] for notes in result.callbacks] == ["end enough, says rank 1"] * 2


class Raises(Callback):
    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        raise ValueError(f"no luck in step {step}")


class RaisesAndIsOptional(Raises):
    optional = True


def _raising(rank: int) -> list[Callback]:
    return [Raises(), Recorder()]


def _optional(rank: int) -> list[Callback]:
    return [RaisesAndIsOptional(), Recorder()]


def test_a_callback_that_raises_fails_the_run_by_its_name(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", [*BASE, "train.max_steps=3"], _raising)
    assert result.errors == ["CallbackError: Raises.on_step_end raised ValueError: no luck in step 1"]
    assert result.callbacks[0][1][-1] == "failed CallbackError"
    assert not (result.output_dir / "export").exists()


def test_an_optional_one_is_reported_once_and_switched_off(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", [*BASE, "train.max_steps=3"], _optional)
    assert result.errors == [""]
    assert result.terminal.count("RaisesAndIsOptional") == 2  # its name stands twice in the one line
    assert result.terminal.count("no luck in step 1; RaisesAndIsOptional is switched off") == 1
    assert "no luck in step 2" not in result.terminal
    assert result.status().step == 3


class Counter(Callback):
    may_stop = False

    def __init__(self) -> None:
        self.notes = 0

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.notes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.notes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.notes = state["count"]


class Other(Counter):
    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.notes += 10


def _counting(rank: int) -> list[Callback]:
    return [Counter(), Other(), Counter()]


def test_the_state_of_callbacks_survives_a_resume_under_another_strategy(inputs: Path, tmp_path: Path) -> None:
    saving = ["save.strategy=steps", "save.steps=2"]
    run(inputs, tmp_path / "out", [*BASE, "train.max_steps=2", *saving], _counting)
    again = [*BASE, "tp=2", "train.max_steps=3", *saving, "resume=auto"]
    result = run(inputs, tmp_path / "out", again, _counting)
    assert result.callbacks == [[3, 30, 3], [3, 30, 3]]


def test_every_line_has_the_flops_of_its_rows(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", [*BASE, "pp=2", "train.epochs=1"])
    model = Plan.load(tmp_path / "out" / "plan.json").model
    lengths = [len(row["input_ids"]) for row in make_rows()]
    for line, rows in zip(result.metrics(), (lengths[:4], lengths[4:]), strict=True):
        assert line["mfu"] is None
        flops = line["tflops_per_device"] * 1e12 * 2 * line["step_seconds"]
        assert flops == pytest.approx(step_flops(model, rows), rel=1e-9)
    assert "FLOP/s a device" in result.terminal


@pytest.mark.parametrize("layout", [["tp=2"], ["pp=2"], ["dp_shard=2"]], ids=" ".join)
def test_adapters_cost_their_own_flops(inputs: Path, tmp_path: Path, layout: list[str]) -> None:
    """Rank 4 on all linear layers of a block: q and o 32x32, k and v 32x16, gate, up and down 32x48."""
    overrides = [*BASE, *layout, "train.max_steps=1", "lora.r=4"]
    result = run(inputs, tmp_path / "out", overrides)
    (line,) = result.metrics()
    adapters = 4 * 4 * (2 * 64 + 2 * 48 + 3 * 80)
    lengths = [len(row["input_ids"]) for row in make_rows()[:4]]
    model = Plan.load(tmp_path / "out" / "plan.json").model
    flops = line["tflops_per_device"] * 1e12 * 2 * line["step_seconds"]
    assert flops == pytest.approx(step_flops(model, lengths, adapters), rel=1e-9)


def test_bad_rows_are_left_out_and_counted(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    os.symlink(inputs / "model", folder / "model")
    good = (inputs / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n".join([good[0], "{", *good[1:3], '{"input_ids": [1, 999]}', good[3]]) + "\n")
    overrides = [*BASE, "tp=2", "train.epochs=1", "log.rows=true"]
    result = run(folder, tmp_path / "out", [*overrides, "data.on_bad_rows=skip"])
    assert [line["num_rows"] for line in result.metrics()] == [4]
    assert "2 bad rows left out, the first on line 2" in result.terminal
    plain = run(inputs, tmp_path / "plain", [*overrides, "data.max_samples=4"])
    assert [(line["loss"], line["row_hashes"]) for line in result.metrics()] == [
        (line["loss"], line["row_hashes"]) for line in plain.metrics()
    ]
    refused = run(folder, tmp_path / "refused", overrides)
    assert all(error.startswith("ConfigError") and "2 of 6 rows" in error for error in refused.errors)
