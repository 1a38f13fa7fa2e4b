"""Plans that cannot run, and memory that was left out (fault cases 13 and 71), each with its kind."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from shardwise.errors import PlanError
from shardwise.planner.job import Job
from shardwise.planner.known import with_degrees
from shardwise.planner.layout import Work
from shardwise.planner.search import search
from shardwise.planner.shape import Shape, model_costs
from shardwise.spec import tolerance
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import load_cluster
from shardwise.spec.model import ModelSpec, read_model
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import SGD, Case, parity

MIB = 2**20
# Heads and KV heads that 3, 4, 5 or 8 ranks do not divide.
HEADS = {"fault-13": (4, 2), "ten-kv-heads": (10, 10), "three-kv-heads": (12, 3)}


@cache
def sizes(name: str, folder: Path) -> tuple[ModelSpec, ModelCosts]:
    heads, kv_heads = HEADS[name]
    hidden = 8 * heads
    shape = Shape(name, 4, hidden, heads, kv_heads, 8, 48, 131)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "vocab_size": 131}
    config |= {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    spec = read_model(folder)
    return spec, with_degrees(model_costs(shape, (1, 2)), spec)


def job(name: str, folder: Path, devices: int, rows: int = 12, memory: float = 0.0, **fixed: object) -> Job:
    spec, costs = sizes(name, folder)
    work = Work(16, "fp32", compute_bytes=4.0, weight_bytes=4.0, optimizer_bytes=8.0, ours=True)
    return Job(spec, costs, load_cluster("a100-40gb"), devices, rows, work, fixed, memory)


@pytest.mark.parametrize("devices", [3, 4, 5, 8])
@pytest.mark.parametrize("name", HEADS)
def test_13_no_plan_cuts_heads_that_cannot_be_cut(name: str, devices: int, tmp_path: Path) -> None:
    """gpustack/gpustack 2259, NVIDIA-NeMo/Automodel 799: three cards, or ten KV heads and four cards."""
    heads, kv_heads = HEADS[name]
    found = search(job(name, tmp_path, devices), top=20)
    for plan in found.plans:
        one = plan.candidate
        assert heads % one.tp == 0
        assert kv_heads % one.tp == 0 or one.tp % kv_heads == 0
        assert one.devices <= devices
        assert one.dp * one.micro_batch_size * one.num_micro_batches(12) == 12


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3, 5, 6, 7] if EVERYTHING else [3])
def test_13_the_plan_runs_and_equals_one_process(devices: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", num_hidden_layers=4)
    wanted = job("fault-13", tmp_path, devices)
    strategy = search(wanted, top=1, only_runnable=True).plans[0].candidate.strategy()
    assert strategy.world_size <= devices
    errors = parity(Case(folder, strategy, tuple(make_rows((8,) * 12)), 12, 2, SGD))
    assert errors.loss <= tolerance.FP32_LOSS
    assert errors.gradient <= tolerance.FP32_GRADIENT, errors.worst_gradient


@pytest.mark.parametrize("fixed", [{}, {"tp": 1}, {"pp": 2, "recompute": "none"}, {"schedule": "zero_bubble"}], ids=str)
@pytest.mark.parametrize("memory", [10 * MIB, 1 * MIB])
def test_71_a_budget_that_nothing_fits_is_refused_by_its_need(
    fixed: dict[str, object], memory: float, tmp_path: Path
) -> None:
    """alpa-projects/alpa 684 and 882: a bare assertion in place of what is missing."""
    with pytest.raises(PlanError) as refused:
        search(job("fault-13", tmp_path, 4, memory=memory, **fixed))
    assert "the smallest need of any split is" in str(refused.value)
    assert refused.value.remedy


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
def test_71_memory_does_not_grow_with_micro_batches(schedule: str, tmp_path: Path) -> None:
    """PKU-DAIR/Hetu-Galvatron 36: activations of two stages stay as they are from 4 to 16 micro-batches."""
    given = {"pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 1, "recompute": "none", "schedule": schedule}
    plans = [search(job("fault-13", tmp_path, 2, rows, **given), top=1).plans[0] for rows in (4, 8, 16)]
    stages = {plan.candidate.stages for plan in plans}
    assert len(stages) == 1
    assert len({tuple(terms["activations"] for terms in plan.estimate.memory_terms) for plan in plans}) == 1


def test_71_all_that_memory_is_made_of_is_counted(tmp_path: Path) -> None:
    """Optimizer, gradients, activations in flight and logits, each by its formula."""
    given = {"pp": 2, "dp": 1, "tp": 1, "micro_batch_size": 2, "recompute": "none", "schedule": "1f1b"}
    wanted = job("fault-13", tmp_path, 2, 16, **given)
    first, last = search(wanted, top=1).plans[0].estimate.memory_terms
    for terms, weights in ((first, first["weights"]), (last, last["weights"])):
        assert terms["gradients"] == pytest.approx(weights)
        assert terms["optimizer"] == pytest.approx(2 * weights)  # two moments; fp32 weights are their own masters
    assert first["activations"] > 1.5 * last["activations"] > 0  # two micro-batches in flight, and one
    assert last["logits"] >= 2 * 16 * 131 * 4 > first["logits"]
