"""A single number that trains has no rows to shard: every rank keeps it, and its gradient is that of all rows.

A table of whole numbers is kept whole too: gathering would make it one of floats.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.models.shard import Shard
from shardwise.parallel.clip import owned_squared_norm
from shardwise.parallel.fsdp import apply_fsdp
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.precision import set_stored_dtypes
from shardwise.parallel.replicate import sum_gradients
from shardwise.spec.layout import ParamLayout
from shardwise.testing import run_distributed
from tests.parallel.harness import strategy

pytestmark = pytest.mark.slow


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(8.0).view(4, 2) / 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.places = nn.Parameter(torch.tensor([2, 3, 0, 1]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight[self.places].T * self.scale).tanh()


def _rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 2, 2)


def _step(rank: int, replicas: int) -> tuple[float, float, bool]:
    """The gradient of the number, this rank's share of the squared norm, and whether it owns the number."""
    split = strategy(dp_shard=2, dp_replicate=replicas)
    mesh = build_mesh(split, torch.device("cpu"))
    module = Scaled().double()
    first = mesh.coordinate("dp_replicate") == 0
    layouts = {name: ParamLayout(name, tuple(p.shape), owned=first) for name, p in module.named_parameters()}
    whole = set_stored_dtypes(module, torch.float64, mesh)
    layouts = apply_fsdp(module, [], mesh, layouts, torch.float64, whole)
    part = _rows().chunk(split.dp)[mesh.data_rank]
    module(part).sum().backward()
    shards = [Shard(layouts[name], parameter) for name, parameter in module.named_parameters()]
    sum_gradients(shards, mesh, None)
    number = next(shard for shard in shards if shard.layout.name == "scale")
    return float(number.ensure_grad()), float(owned_squared_norm(shards)), number.layout.owned


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_single_number_is_summed_over_the_data_ranks(replicas: int) -> None:
    module = Scaled().double()
    module(_rows()).sum().backward()
    found = run_distributed(_step, 2 * replicas, replicas)
    assert [gradient for gradient, _, _ in found] == pytest.approx([float(module.scale.grad)] * len(found), rel=1e-12)
    assert sum(owned for _, _, owned in found) == 1
    squares = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
    assert sum(norm for _, norm, _ in found) == pytest.approx(squares, rel=1e-12)
