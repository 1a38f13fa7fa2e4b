"""From the ranks' numbers to one answer."""

from __future__ import annotations

import math

import torch

from shardwise.check.findings import GradientPart, RankFindings, first_difference, gradient_errors, summarise
from shardwise.check.outputs import RankView, output_errors
from shardwise.check.reference import Reference
from shardwise.spec.tolerance import FLOAT64_GRADIENT, FP32_GRADIENT
from shardwise.tensor.parts import Part
from shardwise.tensor.table import ModuleSplit, ShardingTable, Style


def reference(exact: bool = True) -> Reference:
    gradients = {"a.weight": torch.tensor([3.0, 4.0]), "b.weight": torch.tensor([0.0, 0.0])}
    outputs = {"a": [torch.ones(1, 2)], "b": [torch.ones(1, 2)]}
    return Reference(torch.float64, exact, {}, [2.0], [5.0], gradients, outputs)


def findings(a: float = 0.0, copy: float = 0.0, loss: float | None = 2.0, norm: float = 5.0) -> RankFindings:
    parts = [
        GradientPart("a.weight", a, True),
        GradientPart("a.weight", copy, False),
        GradientPart("b.weight", 0, True),
    ]
    return RankFindings([loss], [norm], parts, {"a": 0.0, "b": 0.0})


def test_owned_slices_add_up_and_a_copy_counts_by_itself() -> None:
    parts = [GradientPart("a.weight", 3.0, True), GradientPart("a.weight", 4.0, True)]
    rest = [GradientPart("b.weight", 0.0, True)]
    assert gradient_errors([*parts, *rest], reference())["a.weight"] == 1.0
    assert gradient_errors([*parts, *rest, GradientPart("a.weight", 10.0, False)], reference())["a.weight"] == 2.0
    # A gradient of zero is measured by the whole gradient: 1e-3 x 5.
    assert gradient_errors([*parts, GradientPart("b.weight", 1e-3, True)], reference())["b.weight"] == 0.2
    assert gradient_errors([*parts, GradientPart("b.weight", math.nan, True)], reference())["b.weight"] == math.inf


def test_limits_are_those_of_what_was_computed() -> None:
    between = 5 * (FLOAT64_GRADIENT * FP32_GRADIENT) ** 0.5  # of a norm of 5
    assert not summarise([findings(between)], reference(), ())["ok"]
    assert summarise([findings(between)], reference(exact=False), ())["ok"]
    assert summarise([findings()], reference(), ())["ok"]
    for wrong in (
        findings(copy=1.0),
        findings(loss=2.1),
        findings(loss=None),
        findings(loss=math.nan),
        findings(norm=4),
    ):
        assert not summarise([findings(), wrong], reference(), ())["ok"]


def test_the_first_output_comes_before_the_gradient_nearest_to_the_loss() -> None:
    order = ["a", "b", "c"]
    wrong = {"a.weight": 1.0, "b.weight": 1.0, "c.weight": 0.0}
    assert first_difference({"b": 1.0, "c": 1.0}, wrong, order, 1e-9)["module"] == "b"
    assert first_difference({}, wrong, order, 1e-9) == {"module": "b", "what": "gradient", "error": 1.0}
    assert first_difference({}, {"a.weight": 0.0}, order, 1e-9)["what"] == "step"


def test_outputs_are_compared_without_padding_and_by_their_columns() -> None:
    whole = [torch.randn(1, 3, 4), torch.randn(1, 2, 4), torch.randn(1, 3, 4)]
    model = torch.nn.ModuleDict({"row": torch.nn.Linear(1, 1), "column": torch.nn.Linear(1, 1)})
    batch = torch.full((2, 3, 4), 9.0)  # what stands in the padding is of no matter
    batch[0, :2], batch[1] = whole[1][0], whole[2][0]
    table = ShardingTable(2, {"column": ModuleSplit(Style.COLUMN, (Part(2), Part(2)))})
    view = RankView(table, 1, 1, [2, 3], 2)
    want = {"row": whole, "column": whole}
    got = {"row": [batch], "column": [batch[..., [1, 3]]]}
    assert output_errors(model, got, want, view) == {"row": 0.0, "column": 0.0}
    got["column"] = [batch[..., :2]]
    assert output_errors(model, got, want, view)["column"] > 0.1
    got["column"] = [batch[..., :3]]  # of another shape: nothing can be said
    assert output_errors(model, got, want, view) == {"row": 0.0}
