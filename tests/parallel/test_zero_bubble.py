"""Backward passes in two halves equal one process, put off what they say, and hold as much as is predicted."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.models.shard import Master
from shardwise.parallel.deferred import DeferredWeights
from shardwise.planner.halves import waiting_bytes
from shardwise.planner.layout import Layout, Work
from shardwise.planner.shape import Shape, model_costs
from shardwise.planner.simulate import peak_bytes
from shardwise.spec import tolerance
from shardwise.spec.schedule import action_lists
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.families import FAMILIES, make_family
from tests.parallel.harness import SGD, Case, Outcome, RankPart, reference, run_case, strategy
from tests.parallel.tables import Table, assert_equal

PP2: dict[str, Any] = {"schedule": "zero_bubble", "pp": 2}
# name -> (model, rows of a step, what differs from two stages)
TABLE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "pp2": ("llama", 4, {}),
    "tied": ("qwen3-tied", 4, {}),
    "uneven": ("qwen3-tied", 5, {"stages": (1, 3)}),
    "recompute": ("qwen2", 4, {"recompute": -1}),
    "recompute-first": ("llama", 4, {"recompute": 1}),
    "two-rows": ("llama", 4, {"micro_batch_size": 2}),
    "transposed": ("gpt2", 4, {}),  # its weights are stored the other way round: their gradients do not wait
    "pp4-even": ("llama", 6, {"pp": 4}),
    "pp4-recompute": ("llama", 7, {"pp": 4, "recompute": -1}),
    "pp4-filled": ("llama-tied", 2, {"pp": 4}),  # fewer rows than stages: empty ones fill up
    "tp2": ("llama", 4, {"tp": 2}),
    "tp2-tied-recompute": ("qwen3-tied", 4, {"tp": 2, "recompute": -1}),
    "tp2-sequence": ("llama", 4, {"tp": 2, "sequence_parallel": True}),
    "dp_shard2": ("llama", 4, {"dp_shard": 2}),
    "dp_shard2-zero3": ("qwen3-tied", 4, {"dp_shard": 2, "reshard": True}),
    "dp_shard2-recompute": ("llama-tied", 8, {"dp_shard": 2, "recompute": -1}),
    "dp_replicate2": ("llama", 4, {"dp_replicate": 2}),
    "dp_replicate2-tied": ("qwen3-tied", 4, {"dp_replicate": 2, "gradient_aggregation_group": 3}),
    "hsdp2x2": ("llama", 4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp2-dp_shard2": ("qwen3-tied", 4, {"tp": 2, "dp_shard": 2, "recompute": 1}),
}
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"train": SGD},
    "float64": {"train": SGD, "dtype": torch.float64, "steps": 2},
    "bf16": {"train": SGD, "dtype": torch.bfloat16, "steps": 2},
}
# Each kind of row once in float64, where nothing hides; the others repeat them, unless everything is asked for.
FEW: dict[str, tuple[str, ...]] = {
    "float64": (
        *("pp2", "tied", "recompute", "transposed", "pp4-even", "pp4-recompute", "pp4-filled", "tp2-tied-recompute"),
        *("tp2-sequence", "dp_shard2", "dp_shard2-zero3", "dp_replicate2-tied"),
    ),
    "sgd": ("pp4-recompute", "tp2-tied-recompute", "dp_shard2-zero3"),
    "bf16": ("pp4-recompute", "dp_shard2"),
}
CASES = [(row, kind) for kind in KINDS for row in TABLE if row in FEW[kind] or EVERYTHING]
ROWS, EVEN = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9))), tuple(make_rows((8,) * 6))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("zero_bubble")
    models = {model for model, _, _ in TABLE.values()}
    return {name: (make_family if name in FAMILIES else make_model)(root / name, name) for name in sorted(models)}


def _case(folders: dict[str, Path], row: str, kind: str) -> Case:
    model, size, changes = TABLE[row]
    rows = EVEN if row == "pp4-even" else ROWS
    return Case(folders[model], strategy(**(PP2 | changes)), rows, size, eval_batch_size=5, **KINDS[kind])


def _reference(case: Case, dtype: torch.dtype) -> Outcome:
    return _known_reference(case.folder, case.global_batch_size, dtype, case.steps, case.rows == EVEN)


@cache
def _known_reference(folder: Path, size: int, dtype: torch.dtype, steps: int, even: bool) -> Outcome:
    rows = EVEN if even else ROWS
    return reference(Case(folder, strategy(), rows, size, steps, SGD, dtype, eval_batch_size=5))


def _run_cases(rank: int, cases: list[Case]) -> list[RankPart]:
    return [run_case(case, partial(_check_held, case)) for case in cases]


def _check_held(case: Case, model: Any) -> None:
    """All stages but the first have put gradients off, where the model allows, as many as the lists say."""
    (stage,) = model.stages
    assert (stage.deferred is None) == stage.is_first
    if stage.deferred is None:
        return
    linear = any(isinstance(module, nn.Linear) for block in stage.blocks for module in block.modules())
    assert (stage.deferred.most_held_bytes > 0) == linear
    assert stage.deferred.held_bytes == 0
    if case.rows == EVEN and case.dtype is torch.float64:
        actions = action_lists("zero_bubble", 4, 6)[stage.index]
        block = model_costs(Shape("llama", 4, 32, 4, 2, 8, 48, 131), [1]).kinds[0]
        one = waiting_bytes(block, Layout(pp=4, schedule="zero_bubble"), Work(8, "fp32", compute_bytes=8.0))
        assert stage.deferred.most_held_bytes == peak_bytes(actions, [0.0] * 4, [one] * 4) == (stage.index + 1) * one


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Table:
    return Table({(row, kind): _case(folders, row, kind) for row, kind in CASES}, _run_cases)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "kind"), CASES)
def test_halves_equal_one_process(row: str, kind: str, outcomes: Table, note_error: Any) -> None:
    case, got = outcomes.cases[row, kind], outcomes[row, kind]
    want = _reference(case, case.dtype)
    if kind != "bf16":
        assert_equal(got, want, note_error, f"zero_bubble {kind}", "sgd")
        return
    assert got.losses == pytest.approx(want.losses, rel=tolerance.BF16_LOSS)
    # No further from fp32 than one process in bf16 is: sums over micro-batches are kept in fp32.
    exact = _reference(case, torch.float32)
    ours, own = _distance(got, exact), _distance(want, exact)
    note_error("zero_bubble bf16 gradient, times one process's", ours / own)
    assert ours <= 1.1 * own


def _distance(a: Outcome, b: Outcome) -> float:
    pairs = [(a.gradients[name].double(), b.gradients[name].double()) for name in b.gradients]
    return float(torch.sqrt(sum(((x - y) ** 2).sum() for x, y in pairs)))


class _Block(nn.Module):
    """One layer twice, one with a bias, one that makes its weight of a parameter, and one whose result is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.other = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
        self.made, self.head = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.relu(self.twice(x)))
        changed = self.other(x)
        changed += 1.0
        return self.head(F.linear(changed, self.made.t()))


def test_the_second_half_adds_what_the_first_left() -> None:
    torch.manual_seed(0)
    block, x = _Block().double(), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    block(x).square().sum().backward()
    want = {name: parameter.grad for name, parameter in block.named_parameters()}
    of_x, x.grad = x.grad, None
    block.zero_grad()
    deferred = DeferredWeights()
    deferred.leave_out(block.head)
    with deferred.recording():
        loss = block(x).square().sum()
    loss.backward()
    left = {name for name, parameter in block.named_parameters() if parameter.grad is None}
    assert left == {"twice.weight", "other.weight"}
    assert torch.allclose(x.grad, of_x)
    second_half = deferred.take()
    # Inputs and gradients of three products of six rows.
    assert deferred.held_bytes == deferred.most_held_bytes == 8 * 6 * (6 + 6 + 6 + 6 + 6 + 4)
    calls: list[str] = []
    block.twice.weight.register_post_accumulate_grad_hook(lambda _: calls.append("twice"))
    second_half()
    assert calls == ["twice"]  # a whole gradient, once: hooks count micro-batches
    for name, parameter in block.named_parameters():
        assert torch.allclose(parameter.grad, want[name]), name
    assert deferred.held_bytes == 0
    with deferred.recording(), torch.no_grad():
        block(x)
    deferred.take()
    assert deferred.held_bytes == 0


def test_a_weight_that_is_read_otherwise_too_wakes_its_hooks_in_both_halves() -> None:
    """So a count of gradients says nothing: replicas are summed at the end of a step."""
    weight, x = nn.Parameter(torch.randn(3, 4)), torch.randn(2, 4, requires_grad=True)
    (F.linear(x, weight).sum() + weight.square().sum()).backward()
    assert weight.grad is not None
    want, weight.grad = weight.grad.clone(), None
    calls: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    deferred = DeferredWeights()
    with deferred.recording():
        loss = F.linear(x, weight).sum() + weight.square().sum()
    loss.backward()
    deferred.take()()
    assert len(calls) == 2
    assert torch.allclose(weight.grad, want)


def test_masters_take_gradients_of_second_halves() -> None:
    layer = nn.Linear(4, 3, bias=False).bfloat16()
    master = Master(layer.weight)
    deferred = DeferredWeights()
    for _ in range(2):
        with deferred.recording():
            out = layer(torch.ones(2, 4, dtype=torch.bfloat16))
        out.sum().backward()
        assert layer.weight.grad is None
        deferred.take()()
    assert master.grad is not None
    assert master.grad.dtype is torch.float32
    assert master.grad.eq(4.0).all()
