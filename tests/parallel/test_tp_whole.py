"""Tables that leave more whole and move less (``strategy.tp_whole``): the numbers of one process all the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.check.costing import model_costs
from shardwise.front.planning import runnable_plan, work_of
from shardwise.models.build import build_on_meta
from shardwise.models.describe import describe_folder
from shardwise.parallel.tensor import proven_table
from shardwise.planner.host import on_cluster
from shardwise.planner.job import Job
from shardwise.planner.search import search
from shardwise.spec.cluster import load_cluster
from shardwise.spec.plan import Plan
from shardwise.spec.run import TrainConfig
from shardwise.spec.strategy import Strategy
from shardwise.tensor.edited import same_split
from shardwise.tensor.table import Style
from tests.fixtures import make_model, make_rows
from tests.parallel.families import make_family
from tests.parallel.harness import Case, Outcome, known_tables, reference, strategy
from tests.parallel.tables import Table, assert_equal

pytestmark = pytest.mark.slow

ROWS = tuple(make_rows((4, 6, 8, 11, 12, 14, 16, 16, 9)))
# What a row leaves whole in a block, and what it splits.
ROWS_OF_TABLE: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Style]]] = {
    "llama/attention": (
        "llama",
        {"tp": 2, "tp_whole": 0.41},
        ("self_attn.q_proj", "self_attn.o_proj"),
        {"mlp.gate_proj": Style.COLUMN, "mlp.down_proj": Style.ROW},
    ),
    "llama/attention-sequence": (
        "llama",
        {"tp": 2, "tp_whole": 0.41, "sequence_parallel": True},
        ("self_attn.q_proj", "self_attn.o_proj"),
        {"mlp.gate_proj": Style.COLUMN, "mlp.down_proj": Style.ROW},
    ),
    "qwen3_moe/attention": (
        "qwen3_moe",
        {"tp": 2, "tp_whole": 0.41},
        ("self_attn.q_proj", "self_attn.o_proj"),
        {"mlp.experts": Style.EXPERTS},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    moe = make_family(tmp_path_factory.mktemp("moe"), "qwen3_moe", num_hidden_layers=2)
    return {"llama": make_model(tmp_path_factory.mktemp("llama"), "llama"), "qwen3_moe": moe}


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Table:
    cases = {}
    for row, (model, degrees, _, _) in ROWS_OF_TABLE.items():
        split = strategy(4 if model == "llama" else 2, **degrees)
        cases[row, "float64"] = Case(folders[model], split, ROWS, steps=3, dtype=torch.float64, eval_batch_size=5)
    return Table(cases)


@pytest.fixture(scope="module")
def planned(folders: dict[str, Path]) -> Strategy:
    """What the planner takes where links are slow, in the form in which a run has it from ``plan.json``."""
    folder = folders["llama"]
    spec, cpu = describe_folder(folder), load_cluster("cpu")
    costs = model_costs(folder, known_tables(), (1, 2))
    slow = replace(cpu, links=tuple(replace(link, bandwidth=1e5) for link in cpu.links))
    work = on_cluster(work_of(16, "fp32", TrainConfig()), slow)
    job = Job(spec, costs, slow, 2, 4, work, {"tp": 2, "sequence_parallel": False}, all_devices=True)
    plan = runnable_plan(job, search(job, only_runnable=True))
    assert plan is not None
    return Plan.from_json(plan.to_json()).strategy


def test_the_planners_choice_equals_one_process(planned: Strategy, folders: dict[str, Path], note_error: Any) -> None:
    """Another table than the one that leaves least whole."""
    assert planned.tp_whole is not None
    case = Case(folders["llama"], planned, ROWS, steps=3, dtype=torch.float64, eval_batch_size=5)
    cases: dict[tuple[str, ...], Case] = {("planned", "float64"): case}
    outcome = Table(cases)["planned", "float64"]
    assert_equal(outcome, _reference(case.folder), note_error, "planned table float64", "sgd")
    meta = build_on_meta(case.folder, None, torch.float64)
    taken, first = (proven_table(meta, 2, known_tables(), whole=share) for share in (planned.tp_whole, None))
    assert not same_split(taken, first)
    assert taken.cost is not None
    assert first.cost is not None
    assert taken.cost.moved < first.cost.moved


@cache
def _reference(folder: Path) -> Outcome:
    return reference(Case(folder, strategy(), ROWS, steps=3, dtype=torch.float64, eval_batch_size=5))


@pytest.mark.parametrize("row", ROWS_OF_TABLE)
def test_equals_one_process(row: str, outcomes: Table, note_error: Any) -> None:
    case = outcomes.cases[row, "float64"]
    assert_equal(outcomes[row, "float64"], _reference(case.folder), note_error, "tp_whole float64", "sgd")
    model, degrees, whole, split = ROWS_OF_TABLE[row]
    sequence, bound = degrees.get("sequence_parallel", False), degrees["tp_whole"]
    meta = build_on_meta(case.folder, None, torch.float64)
    table = proven_table(meta, 2, known_tables(), sequence=sequence, whole=bound)
    blocks = "model.layers.1"
    assert not any(table.is_cut(f"{blocks}.{name}.weight") for name in whole), model
    assert {name: table.style(f"{blocks}.{name}") for name in split} == split
