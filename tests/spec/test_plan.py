"""A plan survives its file, refuses what no rank could run, and says what each rank holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import PlanError
from shardwise.spec.plan import Plan, batch_equation, ranks
from shardwise.spec.strategy import Strategy
from tests.spec.model_folder import make_spec


def _plan(folder: Path, rows: int = 8, changes: dict[str, Any] | None = None, **strategy: Any) -> Plan:
    given = {"stages": (4,)} | strategy
    return Plan(make_spec(folder, **(changes or {})), Strategy(**given), rows, "cpu")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return _plan(tmp_path, pp=2, dp_replicate=1, dp_shard=2, tp=2, micro_batch_size=2, stages=(3, 1))


def test_a_saved_plan_loads_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["devices"] == plan.devices == 8


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["schema"], 2, ["schema 2", "reads 1"]),
        (["strategy", "tp"], 3, ["tp = 3", "1, 2, 4"]),
        (["strategy", "stages"], [2, 1], ["stages [2, 1]", "4 blocks"]),
        (["strategy", "stages"], [4, 0], ["stages [4, 0]", "above 0"]),
        (["strategy", "stages"], [1, 1, 2], ["stages [1, 1, 2]", "2 numbers"]),
        (["strategy", "stages"], 4, ["damaged"]),
        (["strategy", "schedule"], "zigzag", ["schedule 'zigzag'", "gpipe, 1f1b, interleaved"]),
        (["strategy", "schedule"], "interleaved", ["interleaved and virtual_stages = 1", "several stages"]),
        (["strategy", "virtual_stages"], 2, ["1f1b and virtual_stages = 2", "several stages"]),
        (["strategy", "virtual_stages"], 0, ["virtual_stages = 0"]),
        (["strategy", "virtual_stages"], "2", ["damaged"]),
        (["strategy", "warp"], 1, ["damaged", "warp"]),
        (["strategy", "dp_shard"], "2", ["damaged"]),
        (["strategy", "micro_batch_size"], 0, ["damaged"]),
        (["strategy", "gradient_aggregation_group"], 0, ["gradient_aggregation_group = 0", "above 0 or null"]),
        (["strategy", "dp_replicate"], 2, ["8 devices", "for 16"]),
        (["global_batch_size"], 6, ["6 rows", "multiple of 4"]),
        (["global_batch_size"], 0, ["0 rows", "multiple of 4"]),
        (["device_type"], "tpu", ["device_type = 'tpu'", "cpu, cuda or npu"]),
        (["devices"], 4, ["4 devices", "for 8"]),
        (["model"], None, ["damaged"]),
    ],
)
def test_an_edited_plan_that_cannot_run_is_refused(
    plan: Plan, tmp_path: Path, path: list[str], value: Any, words: list[str]
) -> None:
    data = plan.to_json()
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(PlanError) as error:
        Plan.load(file)
    for word in words:
        assert word in str(error.value)


def test_a_sequence_that_no_tensor_rank_shares_is_refused(plan: Plan) -> None:
    data = plan.to_json()
    data["strategy"] |= {"sequence_parallel": True, "tp": 2}
    assert Plan.from_json(data | {"devices": 2 * data["devices"] // plan.strategy.tp}).strategy.sequence_parallel
    data["strategy"] |= {"tp": 1}
    with pytest.raises(PlanError, match=r"plan with sequence_parallel = true.*tp is 1"):
        Plan.from_json(data)


def test_weights_whole_on_no_tensor_ranks_are_refused(plan: Plan) -> None:
    data = plan.to_json()
    data["strategy"] |= {"tp_whole": 0.3, "tp": 2}
    data["devices"] = 2 * data["devices"] // plan.strategy.tp
    assert Plan.from_json(data).strategy.tp_whole == 0.3
    for change in ({"tp": 1}, {"tp_whole": 1.5}):
        with pytest.raises(PlanError, match="must be a share from 0 to 1 with tp above 1"):
            Plan.from_json(data | {"strategy": data["strategy"] | change})


@pytest.mark.parametrize("key", ["model", "strategy", "global_batch_size", "device_type", "devices", "table"])
def test_a_plan_without_one_of_its_keys_names_it(plan: Plan, key: str) -> None:
    data = plan.to_json()
    del data[key]
    with pytest.raises(PlanError, match=f"has no '{key}'"):
        Plan.from_json(data)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", "[" * 100_000])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(file)
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "nowhere.json")


def test_the_batch_is_written_as_one_equation(plan: Plan, tmp_path: Path) -> None:
    assert batch_equation(plan) == "global batch 8 rows = 2 data ranks x 2 rows x 2 micro-batches"
    one = _plan(tmp_path, rows=1)
    assert batch_equation(one) == "global batch 1 row = 1 data rank x 1 row x 1 micro-batch"


def test_ranks_count_the_tensor_axis_fastest_and_the_stages_slowest(plan: Plan) -> None:
    shares = ranks(plan)
    assert [share.rank for share in shares] == list(range(8))
    places = [tuple(share.coordinates[axis] for axis in ("pp", "dp_shard", "tp")) for share in shares]
    assert places == [(p, d, t) for p in range(2) for d in range(2) for t in range(2)]
    assert [share.blocks for share in shares] == [((0, 3),)] * 4 + [((3, 4),)] * 4
    assert str(shares[0]) == "embedding + blocks 0..2, 1/2 by tp and 1/2 by dp_shard"
    assert str(shares[7]) == "blocks 3..3 + head, 1/2 by tp and 1/2 by dp_shard"


@pytest.mark.parametrize("tied", [False, True])
def test_the_ranks_hold_the_whole_model(tmp_path: Path, tied: bool) -> None:
    changes = {"tie_word_embeddings": tied}
    one = _plan(tmp_path, changes=changes)
    whole = 4 * one.model.num_parameters
    assert ranks(one)[0].parameter_bytes == whole
    assert str(ranks(one)[0]) == "embedding + blocks 0..3 + head"
    shards = ranks(_plan(tmp_path, changes=changes, dp_shard=2))
    assert sum(share.parameter_bytes for share in shards) == whole
    halves = ranks(_plan(tmp_path, changes=changes, pp=2, stages=(2, 2)))
    # A tied weight stands on both ends of the pipeline.
    assert sum(share.parameter_bytes for share in halves) == whole + 4 * tied * one.model.embedding_parameters
    tensor = ranks(_plan(tmp_path, changes=changes, tp=2))
    norms = 4 * (4 * one.model.block_norm_parameters + one.model.hidden_size)
    assert sum(share.parameter_bytes for share in tensor) == whole + norms
    copies = ranks(_plan(tmp_path, changes=changes, dp_replicate=2))
    assert [share.parameter_bytes for share in copies] == [whole] * 2


def test_a_rank_of_an_interleaved_pipeline_holds_several_ranges_of_blocks(tmp_path: Path) -> None:
    split = {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "stages": (2, 1, 1, 1)}
    changes = {"num_hidden_layers": 5}
    plan = _plan(tmp_path, changes=changes, **split)
    first, last = ranks(plan)
    assert (first.blocks, last.blocks) == (((0, 2), (3, 4)), ((2, 3), (4, 5)))
    assert str(first) == "embedding + blocks 0..1 and 3..3"
    assert str(last) == "blocks 2..2 and 4..4 + head"
    assert first.parameter_bytes + last.parameter_bytes == 4 * plan.model.num_parameters
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(PlanError, match=r"stages \[2, 3\]: must be 4 numbers"):
        _plan(tmp_path, changes=changes, **(split | {"stages": (2, 3)}))
    with pytest.raises(PlanError, match="pp is 1"):
        _plan(tmp_path, changes=changes, **(split | {"pp": 1}))


def test_a_plan_from_before_virtual_stages_still_runs(plan: Plan) -> None:
    data = plan.to_json()
    del data["strategy"]["virtual_stages"]
    assert Plan.from_json(data) == plan
