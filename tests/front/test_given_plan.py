"""``strategy.plan``: a saved plan runs as it stands, an edited table where it is right, else it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config import apply_overrides
from shardwise.errors import PlanError
from shardwise.front.resolve import prepare
from shardwise.models.build import build_on_meta
from shardwise.parallel.tensor import proven_given, proven_table
from shardwise.spec.plan import Plan
from shardwise.spec.tolerance import FP32_LOSS
from shardwise.tensor.cache import TableCache
from shardwise.tensor.parts import Part
from shardwise.tensor.table import ParamCut, ShardingTable
from tests.parallel.families import family_config
from tests.spec.model_folder import make_folder
from tests.train.runs import Result, make_inputs, run

SPLIT = ["tp=2", "dp_shard=1", "train.max_steps=2", "train.global_batch_size=4", "micro_batch_size=2"]
EDITED = ["train.max_steps=2"]
Edit = Callable[[dict[str, Any]], None]


def _prepared(root: Path, *overrides: str) -> Plan:
    (root / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 8, encoding="utf-8")
    paths = [f"model={root}/m", f"data.train={root}/rows.jsonl", f"output_dir={root}/out", "device=cpu"]
    return prepare(apply_overrides({}, [*paths, *overrides]))[1]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_folder(tmp_path / "m")
    keys = ["pp=2", "stages=[3, 1]", "dp_replicate=2", "recompute=1", "schedule=gpipe", "train.global_batch_size=16"]
    path = tmp_path / "saved.json"
    _prepared(tmp_path, *keys, "devices=4").save(path)
    return path


def test_a_plan_gives_the_strategy_and_the_batch(saved: Path) -> None:
    plan, again = Plan.load(saved), _prepared(saved.parent, f"strategy.plan={saved}")
    assert again.to_json() == plan.to_json()
    assert _prepared(saved.parent, f"strategy.plan={saved}", "pp=2", "dp=2", "devices=4") == again  # says the same
    assert _prepared(saved.parent, f"strategy.plan={saved}", "train.global_batch_size=8").global_batch_size == 8
    grouped = _prepared(saved.parent, f"strategy.plan={saved}", "gradient_aggregation_group=2")  # the plan names none
    assert grouped.strategy == replace(plan.strategy, gradient_aggregation_group=2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["pp=4"], ["strategy.pp = 4", "says 2"]),
        (["recompute=full"], ["strategy.recompute = full", "says 1"]),
        (["devices=3"], ["devices = 3", "devices=4"]),
        (["train.global_batch_size=9"], ["global_batch_size = 9", "8 or 12"]),
        (["strategy.plan=nosuch.json"], ["nosuch.json", "No such file"]),
    ],
)
def test_what_contradicts_a_plan_is_refused(saved: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        _prepared(saved.parent, f"strategy.plan={saved}", *overrides)
    for word in words:
        assert word in str(error.value)


def test_a_plan_for_a_well_known_name_is_for_its_sizes(saved: Path) -> None:
    """It was made without a file, so no hash tells its model."""
    plan = Plan.load(saved)
    replace(plan, model=replace(plan.model, hash="")).save(saved)
    assert _prepared(saved.parent, f"strategy.plan={saved}").strategy == plan.strategy
    make_folder(saved.parent / "m", vocab_size=140)
    with pytest.raises(PlanError, match=r"vocab_size = .*this one has 140"):
        _prepared(saved.parent, f"strategy.plan={saved}")


def test_a_plan_for_another_model_is_refused(saved: Path) -> None:
    make_folder(saved.parent / "m", vocab_size=140)
    with pytest.raises(PlanError, match="another model"):
        _prepared(saved.parent, f"strategy.plan={saved}")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run over two tensor ranks, which has written the table that was found."""
    inputs = make_inputs(tmp_path_factory.mktemp("found"))
    return run(inputs, inputs / "out", SPLIT)


def _edited(found: Result, tmp_path: Path, edit: Edit) -> Result:
    plan = json.loads((found.output_dir / "plan.json").read_text())
    edit(plan["table"])
    (tmp_path / "edited.json").write_text(json.dumps(plan))
    overrides = [*EDITED, f"strategy.plan={tmp_path / 'edited.json'}"]
    return run(found.output_dir.parent, tmp_path / "out", overrides)


def _whole_mlp(table: dict[str, Any], blocks: range) -> None:
    for index in blocks:
        for name in ("gate_proj", "up_proj", "down_proj"):
            del table["modules"][f"model.layers.{index}.mlp.{name}"]


@pytest.mark.slow
def test_an_edited_table_runs_and_the_losses_stay(found: Result, tmp_path: Path) -> None:
    """The feed-forward part of the first two of four blocks is whole on each rank."""
    assert found.errors == ["", ""]
    result = _edited(found, tmp_path, lambda table: _whole_mlp(table, range(2)))
    assert result.errors == ["", ""]
    want, got = ([line["loss"] for line in which.metrics()] for which in (found, result))
    assert got == pytest.approx(want, rel=FP32_LOSS)
    table = json.loads((result.output_dir / "plan.json").read_text())["table"]
    assert "model.layers.0.mlp.up_proj" not in table["modules"]
    assert table["refused"]["model.layers.0.mlp.up_proj"] == "whole in the plan"
    assert "model.layers.2.mlp.up_proj" in table["modules"]


def _without_down(table: dict[str, Any]) -> None:
    del table["modules"]["model.layers.0.mlp.down_proj"]


def _unknown_module(table: dict[str, Any]) -> None:
    table["modules"]["model.layers.9.mlp.up_proj"] = {"style": "column"}


def _unknown_style(table: dict[str, Any]) -> None:
    table["modules"]["lm_head"] = {"style": "diagonal"}


def _no_sum(table: dict[str, Any]) -> None:
    del table["modules"]["model.layers.1.mlp.up_proj"]["group"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_without_down, ["edited at model.layers.0.mlp.down_proj", "does not run"]),
        (_unknown_module, ["model.layers.9.mlp.up_proj", "the model has not"]),
        (_unknown_style, ["damaged", "diagonal"]),
        (_no_sum, ["edited at model.layers.1.mlp.up_proj", "differs from one process"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_edit_that_is_not_right_is_refused(tmp_path: Path, edit: Edit, words: list[str]) -> None:
    """By the function that rank 0 calls."""
    model, tables = build_on_meta(make_folder(tmp_path / "m"), None), TableCache(None)
    found = proven_table(model, 2, tables)
    plain = found.to_json()
    assert proven_given(model, ShardingTable.from_json(plain), 2, tables, sequence=False) == found
    edit(plain)
    with pytest.raises(PlanError) as error:
        proven_given(model, ShardingTable.from_json(plain), 2, tables, sequence=False)
    for word in words:
        assert word in str(error.value)


def test_a_table_of_another_degree_is_refused(tmp_path: Path) -> None:
    model = build_on_meta(make_folder(tmp_path / "m"), None)
    with pytest.raises(PlanError, match="is for tp = 4"):
        proven_given(model, ShardingTable(4), 2, TableCache(None), sequence=False)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([96, 48, 48], [r"\[96, 48, 48\]", r"which holds \[128, 32, 32\] side by side"]),
        ([192], [r"\[192\]", r"which holds \[128, 32, 32\]"]),
    ],
)
def test_parts_that_a_copy_cannot_tell_are_those_that_were_found(sizes: list[int], words: list[str]) -> None:
    """On the copy, whose parts have other proportions, both splits of Nemotron-H's convolution would look right."""
    numbers = {"hidden_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
    numbers |= {"vocab_size": 64, "intermediate_size": 48}
    config = AutoConfig.for_model("nemotron_h", layers_block_type=["linear_attention", "mlp"], **numbers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).train()
    found = proven_table(model, 2)
    name = "model.layers.0.mixer.conv1d.weight"
    edited = replace(found, params=found.params | {name: replace(found.params[name], parts=tuple(map(Part, sizes)))})
    with pytest.raises(PlanError, match=".*".join(words)):
        proven_given(model, edited, 2, TableCache(None), sequence=False)


def test_parts_sum_to_what_they_part() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config("mistral")).train()
    found = proven_table(model, 2)
    name = "model.layers.0.input_layernorm.weight"
    edited = replace(found, params=found.params | {name: ParamCut(0, (Part(16),))})
    with pytest.raises(PlanError, match=r"parts \[16\] of model.layers.0.input_layernorm.weight, which is 32 wide"):
        proven_given(model, edited, 2, TableCache(None), sequence=False)
