"""Train a small model under a strategy and in one plain process, and compare what comes out.

The reference is independent of the product: transformers' own model, one forward over the whole global
batch, torch's cross-entropy, optimizer and clipping.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.naming import naming_of_folder
from shardwise.data.loader import Loader, LoaderSettings
from shardwise.data.rows import Row
from shardwise.models.build import build_on_meta
from shardwise.models.shard import take
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.model import ParallelModel
from shardwise.spec.layout import ParamLayout, covers
from shardwise.spec.run import TrainConfig
from shardwise.spec.strategy import Strategy
from shardwise.spec.tolerance import relative_error
from shardwise.tensor.cache import TableCache, table_folder
from shardwise.testing import run_distributed
from shardwise.train.lr import learning_rate
from shardwise.train.optim import Optimizer
from shardwise.train.step import evaluate, train_step
from tests.decay import decaying
from tests.layouts import put
from tests.parallel.exact import Exact


def known_tables() -> TableCache:
    """Tables that an earlier row has found; each model is searched once a degree. Other tests search on their own."""
    return TableCache(table_folder(os.environ))


@dataclass(frozen=True)
class Case:
    """One run: a model folder, its rows, the mathematics and the split."""

    folder: Path
    strategy: Strategy
    rows: tuple[dict[str, list[int]], ...]
    global_batch_size: int = 4
    steps: int = 6
    train: TrainConfig = field(default_factory=lambda: SGD)
    dtype: torch.dtype = torch.float32
    drop_last: bool = False
    eval_batch_size: int | None = None
    compiled: bool = False
    pack_length: int | None = None  # None: rows are not packed
    attention: str | None = None


@dataclass
class Outcome:
    """What a run produced; tensors by parameter name, whole."""

    losses: list[float | None]
    norms: list[float | None]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    eval_loss: float | None = None


@dataclass(frozen=True)
class Errors:
    """The largest errors of a run against its reference, by the rule of ``spec/tolerance``."""

    loss: float
    norm: float
    gradient: float
    weight: float
    worst_gradient: str


SGD = TrainConfig(optimizer="sgd", learning_rate=0.05, max_grad_norm=1.0, lr_scheduler="linear")
ADAMW = TrainConfig(
    optimizer="adamw", learning_rate=1e-3, weight_decay=0.1, lr_scheduler="cosine", warmup_steps=1, max_grad_norm=1.0
)


def strategy(blocks: int = 4, **degrees: Any) -> Strategy:
    """A strategy with even stages, micro-batches of one row under a pipeline and ``reshard`` by default."""
    pp = degrees.get("pp", 1)
    number = pp * degrees.get("virtual_stages", 1)
    stages = tuple(blocks // number + (stage < blocks % number) for stage in range(number))
    defaults = {"stages": stages, "reshard": pp == 1, "micro_batch_size": 1 if pp > 1 else 2}
    return Strategy(**(defaults | degrees))


def to_rows(raw: Sequence[dict[str, list[int]]]) -> list[Row]:
    return [
        Row(i, i + 1, np.array(r["input_ids"], np.int32), np.array(r.get("labels", r["input_ids"]), np.int32))
        for i, r in enumerate(raw)
    ]


def _precision(case: Case) -> contextlib.AbstractContextManager[None]:
    return Exact() if case.dtype is torch.float64 else contextlib.nullcontext()


def _plain_model(case: Case) -> Any:
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.dtype, experts_implementation="eager").train()
    if case.dtype is torch.float64:  # some models make a few of theirs in fp32, whatever is asked for
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    return model


def reference(case: Case) -> Outcome:
    """The run in this process by plain transformers and torch."""
    with _precision(case):
        model = _plain_model(case)
        train = case.train
        optimizer: torch.optim.Optimizer
        # In bf16 what is stepped are fp32 copies; elsewhere the parameters themselves.
        low = case.dtype is torch.bfloat16
        masters = dict(model.named_parameters())
        if low:
            stored = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
            masters = {n: p.detach() for n, p in stored.named_parameters()}
        decays = decaying(model)
        groups = [
            {"params": [p for n, p in masters.items() if n in decays], "weight_decay": train.weight_decay},
            {"params": [p for n, p in masters.items() if n not in decays], "weight_decay": 0.0},
        ]
        if train.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=0.0, momentum=train.momentum, foreach=False)
        else:
            betas = (train.adam_beta1, train.adam_beta2)
            optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, foreach=False)
        out = Outcome([], [], {}, {})
        per_epoch = [
            case.rows[i : i + case.global_batch_size] for i in range(0, len(case.rows), case.global_batch_size)
        ]
        if case.drop_last and len(per_epoch[-1]) < case.global_batch_size:
            per_epoch.pop()
        for step in range(case.steps):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(masters[name])
            logits, targets = _forward(model, per_epoch[step % len(per_epoch)])
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum()
            loss.backward()
            for name, parameter in model.named_parameters() if low else []:
                masters[name].grad, parameter.grad = parameter.grad.float(), None
            gradients = {n: p.grad.clone() for n, p in masters.items()}
            max_norm = train.max_grad_norm or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(masters.values(), max_norm, foreach=False)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(train, step, case.steps)
            optimizer.step()
            optimizer.zero_grad()
            out.losses.append(loss.item())
            out.norms.append(norm.item())
            if step == 0:
                out.gradients = gradients
        kept = {n: b for n, b in model.named_buffers() if n in model.state_dict() and b.is_floating_point()}
        out.weights = {n: p.detach().clone() for n, p in (masters | kept).items()}
        if case.eval_batch_size:
            with torch.no_grad():
                parts = [_forward(model.eval(), [row]) for row in case.rows]
                total = sum(torch.nn.functional.cross_entropy(x, t, reduction="sum").item() for x, t in parts)
                out.eval_loss = total / sum(int((t != -100).sum()) for _, t in parts)
        return out


def _forward(model: Any, rows: Sequence[dict[str, list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    targets = torch.full_like(ids, -100)
    for place, row in enumerate(rows):
        size = len(row["input_ids"])
        ids[place, :size] = torch.tensor(row["input_ids"])
        mask[place, :size] = 1
        targets[place, : size - 1] = torch.tensor(row.get("labels", row["input_ids"])[1:])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    if logits.dtype is torch.bfloat16:  # the loss is taken in fp32
        logits = logits.float()
    return logits.flatten(0, 1), targets.flatten()


@dataclass
class RankPart:
    """What one rank saw of a run."""

    losses: list[float | None]
    norms: list[float | None]
    gradients: list[tuple[ParamLayout, torch.Tensor]]
    weights: list[tuple[ParamLayout, torch.Tensor]]
    eval_loss: float | None


def build(case: Case) -> tuple[ParallelModel, Mesh]:
    """This rank's part of the case's model, with its weights."""
    mesh = build_mesh(case.strategy, torch.device("cpu"))
    hf_model = build_on_meta(case.folder, case.attention, case.dtype)
    naming = naming_of_folder(case.folder, hf_model)
    model, _ = parallelize(hf_model, mesh, compiled=case.compiled, tables=known_tables())
    load_slices(case.folder, model.shards, naming)
    return model, mesh


def loader_of(case: Case, mesh: Mesh) -> Loader:
    settings = LoaderSettings(
        case.global_batch_size,
        case.strategy.micro_batch_size,
        mesh.data_rank,
        case.strategy.dp,
        case.strategy.pp,
        shuffle=False,
        drop_last=case.drop_last,
        packing=case.pack_length is not None,
        pack_length=case.pack_length,
    )
    return Loader(to_rows(case.rows), settings)


def run_case(case: Case, at_end: Callable[[ParallelModel], None] | None = None) -> RankPart:
    """The run on this rank, by the product's own loader, model, optimizer and step; ``at_end`` sees the model last."""
    with _precision(case):
        model, mesh = build(case)
        optimizer = Optimizer(model.shards, case.train)
        out = RankPart([], [], [], [], None)
        loader = loader_of(case, mesh)
        batches = loader.batches()
        for step in range(case.steps):
            batch = next(batches)
            if step == 0:
                out.gradients = _first_gradients(model, batch)
            rate = learning_rate(case.train, step, case.steps)
            result = train_step(model, optimizer, batch, rate, case.train.max_grad_norm, [])
            out.losses.append(result.loss)
            out.norms.append(result.grad_norm)
        if case.eval_batch_size:
            out.eval_loss = evaluate(model, loader.eval_batches(case.eval_batch_size))[0]
        out.weights = [(shard.layout, shard.data.clone()) for shard in model.shards]
        if at_end is not None:
            at_end(model)
        return out


def _first_gradients(model: ParallelModel, batch: Any) -> list[tuple[ParamLayout, torch.Tensor]]:
    real = batch.lengths, batch.num_input_tokens
    model.forward_backward(batch.input_ids, batch.targets, batch.position_ids, batch.num_tokens, real)
    trained = [s for s in model.shards if s.parameter.requires_grad]
    gradients = [(s.layout, torch.zeros_like(s.data) if s.grad is None else s.grad.clone()) for s in trained]
    model.zero_grad()
    return gradients


def run_cases(rank: int, cases: list[Case]) -> list[RankPart]:
    """All cases of one world size, one after the other, on ranks that are started once."""
    return [run_case(case) for case in cases]


def assemble(parts: Sequence[RankPart]) -> Outcome:
    """Whole tensors from the owned slices of all ranks; every element must have exactly one owner."""
    first = parts[0]
    for part in parts:
        assert part.losses == first.losses, "ranks disagree about the loss"
        assert part.norms == first.norms, "ranks disagree about the norm"
        assert part.eval_loss == first.eval_loss
    gradients = _whole([item for part in parts for item in part.gradients])
    weights = _whole([item for part in parts for item in part.weights])
    return Outcome(first.losses, first.norms, gradients, weights, first.eval_loss)


def _whole(slices: list[tuple[ParamLayout, torch.Tensor]]) -> dict[str, torch.Tensor]:
    by_name: dict[str, list[tuple[ParamLayout, torch.Tensor]]] = {}
    for layout, values in slices:
        by_name.setdefault(layout.source, []).append((layout, values))
    whole = {}
    for name, held in by_name.items():
        assert covers([layout for layout, _ in held]), f"{name} is not owned exactly once"
        whole[name] = torch.empty(held[0][0].shape, dtype=held[0][1].dtype)
        for layout, values in held:
            put(whole[name], layout, values, owned=True)
        for layout, values in held:  # replicas and tied copies hold the same bits as the owner
            assert torch.equal(take(whole[name], layout), values), f"a copy of {name} has drifted"
    return whole


def compare(got: Outcome, want: Outcome) -> Errors:
    """The errors of the parity rule."""
    assert set(got.gradients) == set(want.gradients)
    assert set(got.weights) == set(want.weights)
    whole = float(torch.sqrt(sum((g.double() ** 2).sum() for g in want.gradients.values())))
    errors = {
        name: relative_error(float((got.gradients[name].double() - g.double()).norm()), float(g.norm()), whole)
        for name, g in want.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    weight = max(
        relative_error(float((got.weights[name].double() - w.double()).norm()), float(w.norm()))
        for name, w in want.weights.items()
    )
    return Errors(_largest(got.losses, want.losses), _largest(got.norms, want.norms), errors[worst], weight, worst)


def _largest(got: Sequence[float | None], want: Sequence[float | None]) -> float:
    assert len(got) == len(want)
    assert [g is None for g in got] == [w is None for w in want]
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if g is not None and w is not None]
    return max(relative_error(abs(g - w), abs(w)) for g, w in pairs)


def parity(case: Case, timeout: float = 120.0) -> Errors:
    """Run one case on its own ranks and compare."""
    parts = run_distributed(run_cases, case.strategy.world_size, [case], timeout=timeout)
    return compare(assemble([rank[0] for rank in parts]), reference(case))
