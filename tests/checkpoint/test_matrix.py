"""Saved under each of eight layouts of four ranks, resumed under each other, in one group of processes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.listing import complete_checkpoints
from shardwise.checkpoint.save_job import save_checkpoint
from shardwise.checkpoint.store import load_checkpoint
from shardwise.models.shard import take
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.model import ParallelModel
from shardwise.spec import tolerance
from shardwise.spec.run import LoraConfig
from shardwise.testing import run_distributed
from shardwise.train.lr import learning_rate
from shardwise.train.optim import Optimizer
from shardwise.train.saving import all_tensors
from shardwise.train.step import train_step
from tests.fixtures import make_model, make_rows
from tests.layouts import put
from tests.long import EVERYTHING
from tests.parallel import harness, lora_harness
from tests.parallel.harness import ADAMW, Case, loader_of, strategy
from tests.parallel.lora_harness import LoraCase, make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS, SAVED_AT, MORE = 4, 2, 5
LAYOUTS: dict[str, dict[str, int]] = {
    "tp4": {"tp": 4},
    "pp4": {"pp": 4},
    "dp_shard4": {"dp_shard": 4},
    "dp_replicate4": {"dp_replicate": 4},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-dp_shard2": {"tp": 2, "dp_shard": 2},
    "pp2-dp_replicate2": {"pp": 2, "dp_replicate": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
}
ALL_PAIRS = list(itertools.permutations(LAYOUTS, 2))
# Each layout saves once and resumes once; LoRA with what its layers differ by.
FEW = {
    "full": list(zip(LAYOUTS, [*list(LAYOUTS)[3:], *list(LAYOUTS)[:3]], strict=True)),
    "lora": [("tp4", "dp_shard4"), ("hsdp2x2", "tp2-pp2"), ("pp4", "tp2-dp_shard2")],
}
State = dict[tuple[str, str], torch.Tensor]
Built = tuple[ParallelModel, Mesh, Optimizer]


def _case(root: Path, kind: str, layout: str) -> Case:
    split = strategy(micro_batch_size=1, **LAYOUTS[layout])
    rows, steps = tuple(make_rows()), SAVED_AT + MORE
    if kind == "full":
        return Case(root / "model", split, rows, 4, steps, ADAMW)
    return LoraCase(
        root / "model", split, rows, 4, steps=steps, train=ADAMW, lora=LoraConfig(r=4), adapter=root / "adapter"
    )


def _build(case: Case) -> Built:
    model, mesh = lora_harness.build(case)[:2] if isinstance(case, LoraCase) else harness.build(case)
    return model, mesh, Optimizer(model.shards, case.train)


def _parts(model: ParallelModel, optimizer: Optimizer) -> list[tuple[str, Any, torch.Tensor]]:
    """What a checkpoint must bring back: values, and both moments of AdamW."""
    trained = [("weight", shard.layout, shard.data) for shard in model.shards if shard.parameter.requires_grad]
    return trained + [(slot, s.layout, value) for slot in optimizer.slots for s, value in optimizer.state(slot)]


def _steps(case: Case, model: ParallelModel, mesh: Mesh, optimizer: Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step, batch in zip(range(last), loader_of(case, mesh).batches(), strict=False):
        if step >= first:
            rate = learning_rate(case.train, step, case.steps)
            loss = train_step(model, optimizer, batch, rate, case.train.max_grad_norm, []).loss
            assert loss is not None
            losses.append(loss)
    return losses


def _save(case: Case, built: Built, folder: Path) -> tuple[list[float], State]:
    """Two steps and a checkpoint; the losses, and the whole state put together from all ranks."""
    model, mesh, optimizer = built
    losses = _steps(case, model, mesh, optimizer, 0, SAVED_AT)
    save_checkpoint(folder, SAVED_AT, all_tensors(model, optimizer), {}, Companions(case.folder))
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, [(slot, layout, value.clone()) for slot, layout, value in _parts(model, optimizer)])
    whole: State = {}
    for slot, layout, value in itertools.chain(*parts):
        put(whole.setdefault((slot, layout.source), torch.full(layout.shape, torch.nan)), layout, value)
    return losses, whole


def _resume(case: Case, built: Built, folder: Path, saved: State) -> list[float]:
    """Everything is bit-equal before the first step; the losses of five more."""
    model, mesh, optimizer = built
    for _, _, value in _parts(model, optimizer):
        value.fill_(torch.nan)  # what is loaded must replace all of it
    load_checkpoint(complete_checkpoints(folder)[-1], all_tensors(model, optimizer))
    optimizer.set_num_updates(SAVED_AT)
    for slot, layout, value in _parts(model, optimizer):
        assert torch.equal(value, take(saved[slot, layout.source], layout)), (slot, layout.name)
    return _steps(case, model, mesh, optimizer, SAVED_AT, case.steps)


def _all_pairs(rank: int, root: Path, kind: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    """Losses of every pair's seven steps. Each layout is built once, which takes longer than all its steps."""
    cases = {layout: _case(root, kind, layout) for layout in sorted({layout for pair in pairs for layout in pair})}
    built = {layout: _build(case) for layout, case in cases.items()}
    saved = {
        layout: _save(cases[layout], built[layout], root / kind / layout)
        for layout in sorted({before for before, _ in pairs})
    }
    found = {}
    for before, after in pairs:
        first, state = saved[before]
        found[before, after] = first + _resume(cases[after], built[after], root / kind / before, state)
    return found


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_50_any_layout_goes_on_from_any_other(tmp_path: Path, kind: str) -> None:
    make_model(tmp_path / "model", "llama-tied")
    if kind == "lora":
        make_adapter(tmp_path / "model", tmp_path / "adapter", LoraConfig(r=4))
    case = _case(tmp_path, kind, "tp4")
    want = (lora_harness.reference(case) if isinstance(case, LoraCase) else harness.reference(case)).losses
    pairs = ALL_PAIRS if EVERYTHING else FEW[kind]
    losses = run_distributed(_all_pairs, RANKS, tmp_path, kind, pairs, timeout=800)[0]
    assert set(losses) == set(pairs)
    for pair, values in losses.items():
        assert values == pytest.approx(want, rel=tolerance.FP32_LOSS), pair
