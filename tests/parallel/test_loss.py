"""The token loss against torch's cross-entropy, value and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.parallel.loss import token_loss_sum
from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.parallel.harness import SGD, Case, build, strategy


def _targets(kind: str) -> torch.Tensor:
    targets = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(1))
    if kind == "some":
        targets[0, 1:4] = -100
    return torch.full_like(targets, -100) if kind == "none" else targets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all", "some", "none"])
def test_equals_cross_entropy(kind: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 5, 13, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = token_loss_sum(ours, _targets(kind))
    exact = plain.float() if dtype is torch.bfloat16 else plain
    want = torch.nn.functional.cross_entropy(exact.flatten(0, 1), _targets(kind).flatten(), reduction="sum")
    (loss * 0.25).backward()
    (want * 0.25).backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(ours.grad, plain.grad)
    assert torch.equal(ours, logits)  # the caller's logits are not overwritten


def _split(rank: int, kind: str) -> Any:
    logits = torch.randn(2, 5, 13, generator=torch.Generator().manual_seed(0)) * 3
    start, stop = (0, 7) if rank == 0 else (7, 13)
    mine = logits[..., start:stop].clone().requires_grad_()
    loss = token_loss_sum(mine, _targets(kind), start, torch.distributed.group.WORLD)
    loss.backward()
    return loss.item(), mine.grad


@pytest.mark.parametrize("kind", ["all", "some"])
def test_a_split_vocabulary_gives_the_whole_loss(kind: str) -> None:
    logits = (torch.randn(2, 5, 13, generator=torch.Generator().manual_seed(0)) * 3).requires_grad_()
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), _targets(kind).flatten(), reduction="sum")
    want.backward()
    (first, left), (second, right) = run_distributed(_split, 2, kind)
    assert first == second == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(torch.cat([left, right], dim=-1), logits.grad)


def _drift(rank: int, case: Case, drift: bool) -> bool:
    model, mesh = build(case)
    if drift and mesh.is_last_stage:
        for shard in model.shards:
            if shard.layout.tied_to is not None:
                shard.data[0, :2] = shard.data[0, :2].flip(0)  # same values, other places
    return model.tied_copies_agree()


@pytest.mark.parametrize("drift", [False, True])
def test_a_drifted_copy_of_a_tied_weight_is_noticed(tmp_path: Path, drift: bool) -> None:
    case = Case(make_model(tmp_path, "llama-tied"), strategy(pp=2), tuple(make_rows()), train=SGD)
    assert all(run_distributed(_drift, 2, case, drift)) is not drift
