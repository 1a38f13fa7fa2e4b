"""Rows that several tensor ranks hold: gradients, norm and step are those of one process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise.models.shard import Shard, take
from shardwise.parallel.clip import owned_squared_norm
from shardwise.parallel.fsdp import apply_fsdp
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.replicate import sum_gradients
from shardwise.spec import tolerance
from shardwise.spec.layout import ParamLayout, covers, over_tensor_ranks
from shardwise.spec.strategy import Strategy
from shardwise.spec.tolerance import relative_error
from shardwise.testing import run_distributed
from tests.layouts import held, put, random_grid
from tests.parallel.harness import strategy

SHAPES = {"qkv": (24, 5), "bias": (24,), "gate_up": (3, 10, 4), "out": (7, 12), "conv": (9, 1, 4), "few": (2, 3)}


def _share(name: str, shape: tuple[int, ...], tp_rank: int) -> torch.Tensor:
    """What a tensor rank's work gives the gradient of a whole parameter; whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(hash((len(name), shape, tp_rank)) % 2**31)
    return torch.randint(-9, 10, shape, generator=generator).double()


def _sum_random(split: Strategy) -> tuple[float, float]:
    """The squared norm over all ranks of gradients of many layouts, and what it should be."""
    mesh = build_mesh(split, torch.device("cpu"))
    place = mesh.coordinate("tp") * split.dp_shard + mesh.coordinate("dp_shard")
    shards, wants, total = [], [], 0.0
    for (name, shape), seed in itertools.product(SHAPES.items(), range(8)):
        layouts = random_grid(seed, shape, split.tp, split.dp_shard, name)
        whole = torch.zeros(shape, dtype=torch.float64)
        for number, layout in enumerate(layouts):
            if layout.tp_dim is None and number >= split.dp_shard:
                continue  # replicated and complete on every rank: not summed
            mask = torch.zeros_like(whole)
            put(mask, layout, torch.ones(layout.local_shape, dtype=torch.float64))
            whole += mask * _share(name, shape, number // split.dp_shard if layout.tp_dim is not None else 0)
        parameter = nn.Parameter(torch.zeros(layouts[place].local_shape, dtype=torch.float64))
        tp_rank = mesh.coordinate("tp") if layouts[place].tp_dim is not None else 0
        parameter.grad = held(_share(name, shape, tp_rank), layouts[place]).clone()
        shards.append(Shard(layouts[place], parameter))
        wants.append(held(whole, layouts[place]))
        total += float(whole.square().sum())
    assert any(shard.layout.tp_shared for shard in shards)
    sum_gradients(shards, mesh, None)
    for shard, want in zip(shards, wants, strict=True):
        assert torch.equal(shard.ensure_grad(), want), shard.layout
    norm = owned_squared_norm(shards)
    dist.all_reduce(norm)
    return float(norm), total


HIDDEN, HEADS, WIDTH, LENGTH, ROWS = 16, 8, 4, 6, 4


@dataclass(frozen=True)
class Heads:
    """Grouped-query attention whose query, key and value weights lie in one matrix, and whose ranks share key heads."""

    num_kv_heads: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return (HEADS + 2 * self.num_kv_heads) * WIDTH

    def layout(self, tp: int, rank: int) -> ParamLayout:
        """Each rank its query heads, and the key and value heads that these attend to."""
        return over_tensor_ranks(
            ParamLayout("qkv", (self.rows, HIDDEN)), 0, [self._ranges(tp, r) for r in range(tp)], rank
        )

    def _ranges(self, tp: int, rank: int) -> tuple[tuple[int, int], ...]:
        query, share = HEADS // tp, HEADS // self.num_kv_heads
        first, last = rank * query // share, ((rank + 1) * query - 1) // share + 1
        starts = (HEADS, HEADS + self.num_kv_heads)
        heads = [(rank * query, (rank + 1) * query), *((start + first, start + last) for start in starts)]
        return tuple((low * WIDTH, high * WIDTH) for low, high in heads)

    def start(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight, inputs and the weights of the loss."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.rows, HIDDEN), (ROWS, LENGTH, HIDDEN), (ROWS, HEADS, LENGTH, WIDTH)]
        weight, x, scale = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return weight.to(self.dtype), x.to(self.dtype), scale.to(self.dtype)


class Attention(nn.Module):
    def __init__(self, weight: torch.Tensor, num_heads: int) -> None:
        super().__init__()
        self.qkv = nn.Parameter(weight.clone())
        self.num_heads = num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, length, hidden] -> [rows, heads, length, width]."""
        heads = F.linear(x, self.qkv).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        kv = (heads.shape[1] - self.num_heads) // 2
        q, k, v = heads.split([self.num_heads, kv, kv], 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _attend(heads: Heads, split: Strategy) -> Any:
    """One step on this rank: its part of gradient, squared norm and weights."""
    mesh = build_mesh(split, torch.device("cpu"))
    weight, x, scale = heads.start()
    layout = heads.layout(split.tp, mesh.coordinate("tp"))
    query = HEADS // split.tp
    module = Attention(take(weight, layout), query)
    layouts = apply_fsdp(module, [], mesh, {"qkv": layout}, heads.dtype, {}) if split.dp_shard > 1 else {"qkv": layout}
    rows = slice(mesh.data_rank * ROWS // split.dp, (mesh.data_rank + 1) * ROWS // split.dp)
    own = slice(mesh.coordinate("tp") * query, (mesh.coordinate("tp") + 1) * query)
    (module(x[rows]) * scale[rows, own]).sum().backward()
    shard = Shard(layouts["qkv"], module.qkv)
    sum_gradients([shard], mesh, None)
    gradient = shard.ensure_grad().clone()
    norm = float(owned_squared_norm([shard]))
    shard.data.sub_(gradient, alpha=0.1)
    return shard.layout, gradient, norm, shard.data.clone()


SPLITS = {"tp 4": strategy(tp=4), "tp 2, dp_shard 2": strategy(tp=2, dp_shard=2)}
CASES = {
    f"{num} key heads, {name}, {dtype}": (Heads(num, dtype), SPLITS[name])
    for num, name in [(2, "tp 4"), (1, "tp 4"), (1, "tp 2, dp_shard 2")]
    for dtype in (torch.float32, torch.float64)
}


def _all(rank: int) -> dict[str, Any]:
    results = {name: _sum_random(split) for name, split in SPLITS.items()}
    results |= {name: _attend(*case) for name, case in CASES.items()}
    dist.barrier()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(_all, 4)


@pytest.mark.parametrize("name", SPLITS)
def test_shares_of_random_ranges_are_summed_over_those_who_hold_them(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:  # each rank has compared its gradients
        norm, want = rank[name]
        assert norm == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_key_heads_train_as_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    heads, _ = CASES[name]
    weight, x, scale = heads.start()
    module = Attention(weight, HEADS)
    (module(x) * scale).sum().backward()
    gradient = module.qkv.grad
    assert gradient is not None
    parts = [rank[name] for rank in ranks]
    assert covers([layout for layout, *_ in parts])
    assert any(layout.tp_foreign for layout, *_ in parts)
    got, stepped = torch.zeros_like(gradient), torch.zeros_like(gradient)
    for layout, own, _, after in parts:
        put(got, layout, own, owned=True)
        put(stepped, layout, after, owned=True)
    for layout, own, _, after in parts:  # copies hold the same bits
        assert torch.equal(take(got, layout), own)
        assert torch.equal(take(stepped, layout), after)
    limit = tolerance.FP32_GRADIENT if heads.dtype is torch.float32 else tolerance.FLOAT64_GRADIENT
    assert relative_error(float((got - gradient).norm()), float(gradient.norm())) <= limit
    norm = sum(squared for _, _, squared, _ in parts) ** 0.5
    assert relative_error(abs(norm - float(gradient.norm())), float(gradient.norm())) <= limit
    want = weight - 0.1 * gradient
    assert relative_error(float((stepped - want).norm()), float(want.norm())) <= limit
