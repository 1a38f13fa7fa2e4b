"""The costs of a model as data."""

from __future__ import annotations

import json

import pytest

from shardwise.errors import PlanError
from shardwise.planner.shape import Experts, Shape, model_costs
from shardwise.spec.block import ModelCosts

SHAPE = Shape("small", 3, 64, 8, 2, 8, 160, 131, experts=Experts(4, 2, 32, 16), num_dense=1, more_blocks=1)


def test_costs_survive_json() -> None:
    costs = model_costs(SHAPE)
    assert ModelCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs


@pytest.mark.parametrize("change", [{"kinds": [{}]}, {"order": None}, {"unknown": 1}])
def test_damaged_costs_are_refused(change: dict) -> None:
    with pytest.raises(PlanError, match="are damaged"):
        ModelCosts.from_json({**model_costs(SHAPE).to_json(), **change})


def test_legal_degrees_and_the_rule_of_the_others() -> None:
    costs = model_costs(SHAPE, range(1, 10))
    assert costs.legal_degrees() == [1, 2, 4, 8]
    rules = {split.degree: split.rule for split in costs.kinds[0].degrees}
    assert rules[3] == "does not divide the 8 attention heads"
    with pytest.raises(KeyError):
        costs.kinds[0].degree(64)


def test_a_kv_head_has_whole_ranks() -> None:
    costs = model_costs(Shape("six", 2, 96, 12, 4, 8, 160, 131), range(1, 13))
    assert costs.legal_degrees() == [1, 2, 4, 12]
    assert "nor is a multiple" in costs.kinds[0].degree(6).rule
