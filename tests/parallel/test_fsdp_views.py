"""FSDP's warning of a view that a module returns: told where it may matter, and nowhere else."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.testing import run_distributed
from tests.fixtures import make_rows
from tests.parallel.families import make_family
from tests.parallel.harness import Case, build, loader_of, strategy

pytestmark = pytest.mark.slow


class _View(torch.autograd.Function):
    """Its input as it is, which autograd makes a view of it."""

    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _return_a_view(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: _View.apply(forward(*args, **kwargs))


def _modules_warned_of(rank: int, folder: Path, views: bool) -> list[str]:
    """The modules that a step's forward and backward passes warn of."""
    case = Case(folder, strategy(dp_shard=2), tuple(make_rows()))
    model, mesh = build(case)[:2]
    if views:
        _return_a_view(model.stages[0].blocks[0])
    batch = next(loader_of(case, mesh).batches())
    with warnings.catch_warnings(record=True) as told:
        model.forward_backward(batch.input_ids, batch.targets, batch.position_ids, batch.num_tokens)
    texts = [str(warning.message) for warning in told]
    return [text.split("(")[1].split(")")[0] for text in texts if "returned a view tensor" in text]


@pytest.mark.parametrize(
    ("family", "changes", "views", "warned"),
    [
        ("phi", {}, False, set()),  # its head has a bias, so that the logits are a view
        ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.01}, False, set()),
        ("phi", {}, True, {"FSDPPhiDecoderLayer"}),
    ],
    ids=["head with a bias", "balance loss", "block that returns a view"],
)
def test_what_is_warned_of(
    tmp_path: Path, family: str, changes: dict[str, object], views: bool, warned: set[str]
) -> None:
    folder = make_family(tmp_path / family, family, **changes)
    for modules in run_distributed(_modules_warned_of, 2, folder, views):
        assert set(modules) == warned
