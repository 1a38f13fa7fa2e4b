"""Checkpoints by parameter name: what one layout saves, any other goes on from."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import export_model
from shardwise.checkpoint.listing import STATE_FILE, complete_checkpoints
from shardwise.checkpoint.naming import plain_naming
from shardwise.checkpoint.save_job import save_checkpoint
from shardwise.checkpoint.shelf import rotate, supersede
from shardwise.checkpoint.store import SlicedTensor, load_checkpoint
from shardwise.errors import CheckpointError, SaveError
from shardwise.models.shard import Shard
from shardwise.spec import tolerance
from shardwise.spec.layout import ParamLayout
from shardwise.testing import run_distributed
from shardwise.train.lr import learning_rate
from shardwise.train.optim import Optimizer
from shardwise.train.saving import all_tensors
from shardwise.train.step import train_step
from tests.checkpoint.fakes import fake_checkpoint
from tests.fixtures import make_model, make_rows
from tests.layouts import put
from tests.long import EVERYTHING
from tests.parallel.harness import ADAMW, Case, build, loader_of, reference, strategy

ROWS = tuple(make_rows())
STEPS, SAVED_AT = 5, 2


def _train(rank: int, case: Case, folder: Path, resume: bool) -> tuple[list[float | None], list[tuple[Any, ...]]]:
    """Two steps and a save, or a load and the steps that follow; the losses and the state at the border."""
    model, mesh = build(case)
    optimizer = Optimizer(model.shards, case.train)
    batches = loader_of(case, mesh).batches()
    if resume:
        for shard in model.shards:  # what is loaded must replace all of it
            shard.data.fill_(float("nan"))
        load_checkpoint(complete_checkpoints(folder)[-1], all_tensors(model, optimizer))
        optimizer.set_num_updates(SAVED_AT)
    border = _state(model, optimizer) if resume else []
    losses = []
    for step in range(STEPS if resume else SAVED_AT):
        batch = next(batches)
        if resume and step < SAVED_AT:
            continue
        rate = learning_rate(case.train, step, STEPS)
        losses.append(train_step(model, optimizer, batch, rate, case.train.max_grad_norm, []).loss)
    if not resume:
        save_checkpoint(folder, SAVED_AT, all_tensors(model, optimizer), {"step": SAVED_AT}, Companions(case.folder))
        border = _state(model, optimizer)
    return losses, border


def _state(model: Any, optimizer: Optimizer) -> list[tuple[Any, ...]]:
    weights = [("weight", shard.layout, shard.data.clone()) for shard in model.shards]
    slots = [(slot, s.layout, v.clone()) for slot in optimizer.slots for s, v in optimizer.state(slot)]
    return weights + slots


def _whole(parts: list[list[tuple[Any, ...]]]) -> dict[tuple[str, str], torch.Tensor]:
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for kind, layout, values in (item for part in parts for item in part):
        put(whole.setdefault((kind, layout.source), torch.full(layout.shape, float("nan"))), layout, values)
    return whole


LAYOUTS = {
    "one": {},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "dp_shard3": {"dp_shard": 3, "micro_batch_size": 2},
    "tp2-dp2": {"tp": 2, "dp_shard": 2},
    "pp4": {"pp": 4},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "dp_replicate2": {"dp_replicate": 2},
}


# With other numbers of ranks; tests/checkpoint/test_matrix.py has the pairs of layouts of four.
PAIRS = [(before, after) for before in ("one", "tp2-pp2", "dp_shard3", "interleaved") for after in LAYOUTS]
FEW_PAIRS = [("one", "tp2-pp2"), ("tp2-pp2", "dp_shard3"), ("dp_shard3", "one"), ("interleaved", "tp2-dp2")]
FEW_PAIRS += [("tp2-pp2", "interleaved")]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), PAIRS if EVERYTHING else FEW_PAIRS)
def test_any_layout_goes_on_from_any_other(tmp_path: Path, before: str, after: str) -> None:
    model = make_model(tmp_path / "model", "llama-tied")
    rows = ROWS[:6]  # a batch that two and three data ranks divide

    def case(name: str) -> Case:
        return Case(model, strategy(**LAYOUTS[name]), rows, 6 if "3" in before + after else 4, STEPS, ADAMW)

    checkpoints = tmp_path / "checkpoints"
    first, second = case(before), case(after)
    saved = run_distributed(_train, first.strategy.world_size, first, checkpoints, False)
    resumed = run_distributed(_train, second.strategy.world_size, second, checkpoints, True)
    was, now = _whole([part for _, part in saved]), _whole([part for _, part in resumed])
    assert was.keys() == now.keys()
    assert all(torch.equal(was[key], now[key]) for key in was)
    losses = saved[0][0] + resumed[0][0]
    want = reference(case("one")).losses
    assert losses == pytest.approx(want, rel=tolerance.FP32_LOSS)


FROM_BF16 = [("tp2-pp2", "dp_shard3"), ("dp_shard3", "dp_replicate2"), ("one", "tp2-dp2")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "then"),
    [(*pair, torch.bfloat16) for pair in FROM_BF16]
    + [(*pair, torch.float32) for pair in (FROM_BF16 if EVERYTHING else FROM_BF16[:1])],
)
def test_masters_are_what_a_bf16_run_saves(tmp_path: Path, before: str, after: str, then: torch.dtype) -> None:
    """Bit by bit, with and without FSDP, and for a run that goes on in fp32."""
    model = make_model(tmp_path / "model", "llama-tied")
    size = 6 if "3" in before + after else 4
    first = Case(model, strategy(**LAYOUTS[before]), ROWS[:6], size, STEPS, ADAMW, torch.bfloat16)
    second = replace(first, strategy=strategy(**LAYOUTS[after]), dtype=then)
    saved = run_distributed(_train, first.strategy.world_size, first, tmp_path / "checkpoints", False)
    resumed = run_distributed(_train, second.strategy.world_size, second, tmp_path / "checkpoints", True)
    was, now = _whole([part for _, part in saved]), _whole([part for _, part in resumed])
    assert was.keys() == now.keys()
    assert all(torch.equal(was[key], now[key]) for key in was)
    assert any(not torch.equal(was[key], was[key].bfloat16().float()) for key in was), "no value needs fp32"
    want = reference(replace(first, strategy=strategy())).losses
    assert saved[0][0] + resumed[0][0] == pytest.approx(want, rel=tolerance.BF16_LOSS)


@pytest.mark.slow
def test_53_parameters_with_fewer_rows_than_ranks(tmp_path: Path) -> None:
    """Saved by four shards of weights that have one, two or six rows; resumed by one and by two."""
    sizes = {"hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 2}
    model = make_model(tmp_path / "model", "llama", **sizes, intermediate_size=1)
    first, *others = (
        Case(model, strategy(micro_batch_size=1, **layout), ROWS, 4, STEPS, ADAMW)
        for layout in ({"dp_shard": 4}, {}, {"dp_shard": 2})
    )
    saved = run_distributed(_train, 4, first, tmp_path / "checkpoints", False)
    was, want = _whole([part for _, part in saved]), reference(others[0]).losses
    shapes = {layout.shape[0] for _, layout, _ in saved[0][1]}
    assert {1, 2, 6} <= shapes
    for case in others:
        resumed = run_distributed(_train, case.strategy.world_size, case, tmp_path / "checkpoints", True)
        now = _whole([part for _, part in resumed])
        assert was.keys() == now.keys()
        assert all(torch.equal(was[key], now[key]) for key in was)
        assert saved[0][0] + resumed[0][0] == pytest.approx(want, rel=tolerance.FP32_LOSS)


def _tensor(values: torch.Tensor, shape: tuple[int, ...]) -> SlicedTensor:
    return SlicedTensor.of(values, ParamLayout("w", shape))


def _save_two(rank: int, folder: Path, source: Path) -> None:
    for step in (9, 10, 11):
        save_checkpoint(folder, step, {"model.w": _tensor(torch.full((3,), float(step)), (3,))}, {}, Companions(source))
    if dist.get_rank() == 0:
        rotate(folder, 2)


def test_the_newest_by_step_stay_and_incomplete_ones_do_not_count(tmp_path: Path) -> None:
    run_distributed(_save_two, 2, tmp_path, tmp_path)
    names = [path.name for path in complete_checkpoints(tmp_path)]
    assert names == ["step-00000010", "step-00000011"]
    for name in names:
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "step-00000011" / STATE_FILE).unlink()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000010"]


def _load_wrong(rank: int, folder: Path, name: str, shape: tuple[int, ...]) -> str:
    try:
        load_checkpoint(folder, {name: _tensor(torch.zeros(shape), shape)})
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    run_distributed(_save_two, 1, tmp_path, tmp_path)
    newest = complete_checkpoints(tmp_path)[-1]
    assert "no model.other" in run_distributed(_load_wrong, 1, newest, "model.other", (3,))[0]
    assert "shape (3,)" in run_distributed(_load_wrong, 1, newest, "model.w", (4,))[0]
    assert json.loads((newest / STATE_FILE).read_text()) == {}


def test_checkpoints_beyond_a_resumed_step_are_superseded_and_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        fake_checkpoint(tmp_path, step, {"step": step})
    moved = supersede(tmp_path, 2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000002"]
    assert [json.loads((path / STATE_FILE).read_text())["step"] for path in moved] == [4, 6]
    fake_checkpoint(tmp_path, 4, {"step": "4 again"})
    assert [json.loads((path / STATE_FILE).read_text())["step"] for path in supersede(tmp_path, 3)] == ["4 again"]
    names = sorted(path.name for path in (tmp_path / "superseded").iterdir())
    assert names == ["step-00000004", "step-00000004.2", "step-00000006"]


def _write_without_room(rank: int, root: Path) -> list[tuple[str, int]]:
    """Save and export 256 KiB where no file may grow beyond 64 KiB."""
    layout = ParamLayout("w", (256, 256), owned=rank == 0)
    shard = Shard(layout, torch.nn.Parameter(torch.ones(256, 256)))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, resource.RLIM_INFINITY))
    source, errors = Companions(root / "source"), []
    for write in (
        lambda: export_model(source, root / "export", plain_naming({"w": (256, 256)}, torch.float32), [shard]),
        lambda: save_checkpoint(root, 2, {"model.w": SlicedTensor.of(shard.data, layout)}, {}, source),
    ):
        try:
            write()
        except SaveError as error:
            errors.append((str(error), error.exit_code))
    return errors


def test_55_a_full_disk_is_one_message_and_costs_nothing_that_is_complete(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "kept").touch()
    (errors,) = run_distributed(_write_without_room, 1, tmp_path)
    assert [code for _, code in errors] == [3, 3]
    for (message, _), name in zip(errors, ("model.safetensors", "step-00000002"), strict=True):
        assert name in message
        assert "are free there" in message
        assert "Traceback" not in message
    assert "File too large" in errors[0][0]
    assert (tmp_path / "export" / "kept").exists()
    assert complete_checkpoints(tmp_path) == []
