"""The residual stream cut along the sequence: solved, found, proven on simulated ranks, or refused with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import PlanError
from shardwise.models.shrink import build_small, shrink
from shardwise.spec.tolerance import FLOAT64_GRADIENT, PROOF
from shardwise.tensor.collectives import cut, join
from shardwise.tensor.find import find_table
from shardwise.tensor.group import SimulatedTensorGroup
from shardwise.tensor.parts import Part
from shardwise.tensor.positions import Positions
from shardwise.tensor.regions import ENTRY, EXIT, Region
from shardwise.tensor.search import Mode, Problem, Sizes, enumerate_all, solve
from shardwise.tensor.sequence import uneven_length
from shardwise.tensor.simulate import compare, reference
from shardwise.tensor.table import ModuleSplit, ParamCut, ShardingTable, Style
from tests.parallel.families import family_config


def _in_ranks(size: int, work: Callable[[SimulatedTensorGroup], Any]) -> list[Any]:
    groups = SimulatedTensorGroup.make(size, timeout=20.0)
    results: list[Any] = [None] * size
    threads = [threading.Thread(target=lambda g=g: results.__setitem__(g.rank, work(g))) for g in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=25, deadline=None)
@given(size=st.integers(2, 4), length=st.integers(1, 9), dim=st.integers(0, 2))
def test_cut_and_join_are_each_other_backwards(size: int, length: int, dim: int) -> None:
    """A partial sum scattered and gathered again, in the middle a function of each element, against no ranks."""
    shape = [2, 3, 4]
    shape[dim] = length
    generator = torch.Generator().manual_seed(length)
    parts = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(size)]
    weight = torch.randn(shape, dtype=torch.float64, generator=generator)
    whole = sum(parts).requires_grad_()
    want = (whole.sin() * weight).sum()
    want.backward()

    def work(group: SimulatedTensorGroup, shares: bool) -> tuple[torch.Tensor, torch.Tensor]:
        partial = parts[group.rank].clone().requires_grad_()
        result = join(cut(partial, group, dim, summed=True).sin(), group, dim, length, shares=shares)
        # Whole gradients are the same on every rank; of shares each rank has one.
        scale = 1.0 / size if shares else 1.0
        (result * weight * scale).sum().backward()
        assert partial.grad is not None
        return result.detach(), partial.grad

    for shares in (False, True):
        for result, grad in _in_ranks(size, lambda group, shares=shares: work(group, shares)):
            torch.testing.assert_close(result, whole.detach().sin(), rtol=0, atol=1e-14)
            torch.testing.assert_close(grad, whole.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("size", "length"), [(2, 8), (2, 7), (4, 5), (4, 1), (3, 4)])
def test_positions_behind_the_end_repeat_the_last_one_and_are_never_seen(size: int, length: int) -> None:
    hidden = torch.randn(2, length, 3, dtype=torch.float64)

    def work(group: SimulatedTensorGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        positions = Positions(group)
        given = hidden.clone().requires_grad_()
        own = positions.enter(given)
        assert own.shape == (2, -(-length // size), 3)
        back = positions.leave(own)
        back.square().sum().backward()
        assert given.grad is not None
        return own.detach(), back.detach(), given.grad

    for rank, (own, back, grad) in enumerate(_in_ranks(size, work)):
        places = [min(rank * own.shape[1] + i, length - 1) for i in range(own.shape[1])]
        assert torch.equal(own, hidden[:, places])
        assert torch.equal(back, hidden)
        assert torch.equal(grad, 2 * hidden)


@pytest.mark.parametrize("shape", [(2, 5, 3), (10, 3)])
def test_a_mask_is_that_of_the_whole_sequence(shape: tuple[int, ...]) -> None:
    """Of 9 positions rank 1 of 2 holds 5 to 8, and the last once more."""

    def work(group: SimulatedTensorGroup) -> Positions:
        positions = Positions(group)
        positions.enter(torch.zeros(2, 9, 3))
        return positions

    positions = _in_ranks(2, work)[1]
    assert positions.whole_shape(torch.Size(shape)) == (2, 9, 3)
    mask = torch.arange(54).view(2, 9, 3)
    own = positions.own_mask(mask, torch.Size(shape))
    assert own.shape == shape
    assert torch.equal(own.view(2, 5, 3), mask[:, [5, 6, 7, 8, 8]])
    assert positions.whole_shape(torch.Size((2, 9, 3))) == (2, 9, 3)  # a tensor of all positions


def _attention(splittable: bool = True) -> Problem:
    names = ["q", "k", "o", "router", "experts"]
    residual = Region({ENTRY, "o", "router", "experts"}, {"q", "k", "router", "experts", EXIT})
    chunked = {"q": (Part(64),), "k": (Part(32),)}
    inner = Region({"q", "k"}, {"o"}, chunked=chunked, narrow={"o"}, splittable=splittable)
    sizes = {"q": (64, 64), "k": (64, 32), "o": (64, 64), "router": (64, 4), "experts": (64, 64)}
    return Problem(
        products=names,
        sizes={n: Sizes(i, o, i * o) for n, (i, o) in sizes.items()},
        groups={n: {"k": "q"}.get(n, n) for n in names},
        regions=[residual, inner],
        stacks={"experts": True},
        degree=2,
        hidden_size=64,
        sequence=True,
    )


def test_what_enters_the_residual_stream_is_scattered_and_what_reads_it_is_gathered() -> None:
    solution = solve(_attention())
    splits = {name: choice.split for name, choice in solution.choices.items()}
    assert solution.modes == (Mode.SLICED, Mode.SPLIT)
    assert {n: s.style for n, s in splits.items() if s} == {
        "q": Style.COLUMN,
        "k": Style.COLUMN,
        "o": Style.ROW,
        "experts": Style.EXPERTS,
    }
    assert all(split.group == "" for split in splits.values() if split)  # the gather sums the gradient of the input
    assert [n for n, s in splits.items() if s and s.sequence] == ["o", "experts"]
    assert splits["router"] is None
    assert solution.choices["router"].partial
    # The bytes are those without it: 2 for q and k together, for o, for what experts read and for what they write.
    assert solution.price == pytest.approx(4 * 2 * 64 + 6.0 * 4)
    without = solve(replace(_attention(), sequence=False))
    assert solution.price == without.price


def test_a_region_that_stays_whole_gives_each_rank_its_positions() -> None:
    chosen = solve(_attention(splittable=False)).choices
    assert chosen["o"].split is not None
    assert chosen["o"].split.style is Style.ROW_SPLIT
    problem = _attention(splittable=False)
    odd = replace(problem, sizes={name: replace(size, even=(False, False)) for name, size in problem.sizes.items()})
    assert solve(odd).choices["o"].split.style is Style.SLICE  # the ranks do not divide its inputs


@st.composite
def _problems(draw: st.DrawFn) -> Problem:
    """Chains of products with random regions between them, the first and last in the residual one."""
    count = draw(st.integers(2, 6))
    names = [f"p{i}" for i in range(count)]
    cuts = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    regions = [Region({ENTRY}, {EXIT})] + [Region() for _ in range(2)]
    for name, behind, before in zip(names, cuts, [0, *cuts[:-1]], strict=True):
        regions[before].sinks.add(name)
        regions[behind].sources.add(name)
    for region in regions[1:]:
        region.splittable = draw(st.booleans())
        region.chunked = {source: (Part(8),) for source in sorted(region.sources) if draw(st.booleans())}
        region.narrow = {sink for sink in sorted(region.sinks) if draw(st.booleans())}
    groups = {n: draw(st.sampled_from(names)) for n in names}
    widths = {g: draw(st.integers(1, 64)) for g in names}
    sizes = {n: Sizes(widths[groups[n]], draw(st.integers(1, 64)), draw(st.integers(1, 4096))) for n in names}
    stacks = {n: draw(st.booleans()) for n in names if draw(st.integers(0, 4)) == 0}
    return Problem(names, sizes, groups, regions, stacks, 2, 32, sequence=True)


@settings(max_examples=200, deadline=None)
@given(_problems())
def test_equals_enumeration(problem: Problem) -> None:
    try:
        found = solve(problem)
    except ValueError:
        with pytest.raises(AssertionError):
            enumerate_all(problem)
        return
    assert found.price == pytest.approx(enumerate_all(problem).price)


_BERT = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "is_decoder": True,
}


@cache
def _small(name: str, degree: int) -> Any:
    config = AutoConfig.for_model(name, **_BERT) if name == "roberta" else family_config(name)
    config._attn_implementation = "eager"
    return build_small(shrink(config, degree=degree))


def _table(name: str, degree: int) -> ShardingTable:
    small = _small(name, degree)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(small.config)
    return find_table(real, small, degree, sequence=True)


@pytest.mark.parametrize(
    ("name", "degree", "gathered"),
    [
        ("mistral", 2, {"self_attn": ("hidden_states",), "mlp": ("0",)}),
        ("mistral", 4, {"self_attn": ("hidden_states",), "mlp": ("0",)}),
        ("phi", 2, {"self_attn": ("hidden_states",), "mlp": ("0",)}),
        ("opt", 2, {"self_attn": ("hidden_states",), "fc1": ("0",)}),
        ("bloom", 2, {"self_attention": ("0",), "mlp": ("0",)}),  # and not the residual, which is added to its slice
        # The sum with the residual stands inside of attention, behind what reads the sequence.
        ("roberta", 2, {"attention.self": ("0",), "intermediate": ("0",)}),
        ("qwen2_moe", 2, {"self_attn": ("hidden_states",), "mlp.shared_expert": ("0",)}),
    ],
)
def test_the_sequence_is_gathered_where_shapes_are_read(name: str, degree: int, gathered: dict[str, Any]) -> None:
    """For a length that the ranks do not divide evenly the split equals the whole model, in float64."""
    table = _table(name, degree)
    assert table.sequence is not None
    first = f"{table.sequence.blocks}.0."
    found = {n.removeprefix(first): keys for n, keys in table.sequence.gathered.items() if n.startswith(first)}
    assert found == gathered
    assert ShardingTable.from_json(table.to_json()) == table
    small = _small(name, degree)
    assert uneven_length(degree) % degree
    difference = compare(small, table, reference(small, uneven_length(degree)))
    assert difference.error <= FLOAT64_GRADIENT, difference.where
    # No all-reduce but those of the ends: embedding forward, the head's input backward.
    plain = compare(small, find_table(small, small, degree), reference(small))
    assert difference.moved["all_reduce"] <= plain.moved["all_reduce"] / 3


def test_what_a_table_forgets_shows_in_its_proof() -> None:
    table, small = _table("mistral", 2), _small("mistral", 2)
    want = reference(small, uneven_length(2))
    norm = next(n for n in table.params if n.endswith("input_layernorm.weight"))
    assert table.params[norm] == ParamCut()
    forgotten = replace(table, params={n: cut for n, cut in table.params.items() if n != norm})
    difference = compare(small, forgotten, want)
    assert difference.where == norm
    assert difference.error > PROOF
    assert table.sequence is not None
    gathered = {n: k for n, k in table.sequence.gathered.items() if not n.endswith("0.mlp")}
    with pytest.raises(RuntimeError, match="size"):
        compare(small, replace(table, sequence=replace(table.sequence, gathered=gathered)), want)


_WHOLE, _CUT = ParamCut(), ModuleSplit(Style.COLUMN_GATHER, shares=True)
_OTHER_WAYS: dict[str, tuple[str, dict[str, ModuleSplit | None], tuple[str, ...]]] = {
    "whole": ("mistral", {"gate_proj": None, "up_proj": None, "down_proj": ModuleSplit(Style.SLICE)}, ("gate", "up")),
    "gathered": (
        "mistral",
        {"gate_proj": _CUT, "up_proj": _CUT, "down_proj": ModuleSplit(Style.ROW_SPLIT, sequence=True)},
        (),
    ),
    "experts token by token": ("qwen3_moe", {"experts": None}, ("experts",)),
}


@pytest.mark.parametrize("way", _OTHER_WAYS)
def test_ways_that_are_dearer_here_are_right_too(way: str) -> None:
    """Where a region cannot be split: whole weights on all ranks, or features gathered between cut ones."""
    name, changed, shares = _OTHER_WAYS[way]
    table, small = _table(name, 2), _small(name, 2)
    modules = {n: changed.get(n.rpartition(".")[2], split) for n, split in table.modules.items()}
    parameters = [n for n, _ in small.named_parameters() if any(f"mlp.{short}" in n for short in shares)]
    params = {**table.params, **{n: _WHOLE for n in parameters if "layers" in n and ".gate." not in n}}
    kept = {n: split for n, split in modules.items() if split is not None}
    assert kept != table.modules
    difference = compare(small, replace(table, modules=kept, params=params), reference(small, uneven_length(2)))
    assert difference.error <= FLOAT64_GRADIENT, difference.where


class _Mixing(nn.Module):
    """A norm that looks back: what it gives for a token depends on those before."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + 0.5 * x.roll(1, dims=1))


def test_tokens_that_meet_outside_of_attention_are_refused() -> None:
    small = build_small(_small("mistral", 2).config)
    for block in small.model.layers:
        block.input_layernorm = _Mixing(block.input_layernorm)
    with pytest.raises(PlanError, match="at one token depends on other tokens outside of attention") as error:
        find_table(small, small, 2, sequence=True)
    assert "sequence_parallel=false" in str(error.value)
    find_table(small, small, 2)  # without it the split is right
