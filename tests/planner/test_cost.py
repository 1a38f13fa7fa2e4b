"""Time and memory of a configuration: terms that sum, and that move the way they must."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.adapters import Lora, adapted
from shardwise.planner.cost import Estimate, estimate
from shardwise.planner.layout import Layout, Work
from shardwise.planner.shape import Experts, Shape, model_costs
from shardwise.spec.cluster import ClusterSpec, load_cluster
from shardwise.spec.strategy import default_stages

MODEL = model_costs(Shape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000))
EXPERTS = model_costs(Shape("moe", 8, 2048, 16, 16, 128, 6144, 32000, experts=Experts(16, 2, 1024)))
A100 = load_cluster("a100")
WORK = Work(4096)


def layout(tp: int = 1, pp: int = 1, dp: int = 1, micro_batches: int = 8, **more: object) -> Layout:
    stages = default_stages(32, pp * int(more.get("virtual_stages", 1)))  # type: ignore[call-overload]
    return Layout(tp=tp, pp=pp, dp=dp, shard=dp, num_micro_batches=micro_batches, stages=stages, **more)  # type: ignore[arg-type]


def run(chosen: Layout, cluster: ClusterSpec = A100, work: Work = WORK) -> Estimate:
    return estimate(MODEL, cluster, chosen, work)


def test_every_term_is_there_and_none_is_negative() -> None:
    made = run(layout(2, 4, 2, 8, sequence_parallel=True, zero=1))
    assert made.step_seconds == pytest.approx(sum(made.time_terms.values()))
    assert {"matmul", "attention", "elementwise", "tensor", "data", "bubble", "optimizer"} <= set(made.time_terms)
    assert min(made.time_terms.values()) >= 0
    assert len(made.memory_terms) == 4
    assert all(min(terms.values()) >= 0 for terms in made.memory_terms)
    assert made.memory_bytes == max(sum(terms.values()) for terms in made.memory_terms)


def test_one_device_takes_the_time_of_its_products() -> None:
    """6 N FLOPs a token at the chip's best is the least that a step can take."""
    made = run(layout())
    weights = 32 * MODEL.kinds[0].parameters.split + MODEL.head.parameters.split
    least = 6 * weights * 8 * 4096 / A100.peak("bf16")
    assert least < made.time_terms["matmul"] < 2 * least
    assert made.time_terms["tensor"] == made.time_terms["data"] == made.time_terms["bubble"] == 0


def test_the_state_of_a_weight() -> None:
    """bf16 weights, fp32 gradients, masters and two moments: 18 bytes."""
    terms = run(layout()).memory_terms[0]
    assert terms["weights"] + terms["gradients"] + terms["optimizer"] == pytest.approx(18 * MODEL.num_parameters)


def test_each_level_of_zero_shares_out_more() -> None:
    levels = [run(layout(dp=8, zero=zero)).memory_terms[0] for zero in range(4)]
    state = [sum(terms[name] for name in ("weights", "gradients", "optimizer")) for terms in levels]
    assert state[0] > state[1] > state[2] > state[3]
    assert state[3] == pytest.approx(state[0] / 8)
    assert levels[3]["gathered"] > levels[2]["gathered"] == 0


def test_1f1b_is_flat_in_micro_batches_and_gpipe_is_not() -> None:
    flat = {run(layout(pp=2, micro_batches=number)).memory_bytes for number in (2, 4, 8, 16, 400)}
    assert len(flat) == 1
    several = [run(layout(pp=2, micro_batches=n, schedule="gpipe")).memory_bytes for n in (2, 4, 8)]
    assert several[0] < several[1] < several[2]


def test_the_head_lies_on_the_last_stage() -> None:
    made = run(layout(pp=4, micro_batches=8))
    assert made.memory_terms[3]["logits"] > 0
    assert made.memory_terms[1]["logits"] == 0


def test_recomputation_costs_time_and_saves_memory() -> None:
    none, full = run(layout()), run(layout(recompute="full"))
    assert full.memory_bytes < none.memory_bytes
    assert full.step_seconds > 1.2 * none.step_seconds
    some = run(layout(pp=2, recompute="full", recomputed=(4, 0)))
    assert run(layout(pp=2)).step_seconds <= some.step_seconds <= run(layout(pp=2, recompute="full")).step_seconds


def test_adapters_leave_out_gradients_of_frozen_weights() -> None:
    whole, adapters = run(layout()), estimate(adapted(MODEL, Lora()), A100, layout(), WORK)
    least = 2 / 3 * whole.time_terms["matmul"]
    assert least < adapters.time_terms["matmul"] < 1.2 * least
    assert adapters.memory_terms[0]["optimizer"] < 0.02 * whole.memory_terms[0]["optimizer"]


def test_tensor_parallel_across_nodes_is_slower_than_inside() -> None:
    inside, across = run(layout(tp=8, dp=2)), run(layout(tp=16))
    assert across.time_terms["tensor"] > 1.5 * inside.time_terms["tensor"]


def test_experts_are_shared_out() -> None:
    chosen = replace(layout(dp=8), stages=(8,), shard=8, zero=1)
    alone, shared = (estimate(EXPERTS, A100, replace(chosen, ep=ep), WORK) for ep in (1, 8))
    assert shared.memory_terms[0]["weights"] < alone.memory_terms[0]["weights"]
    assert shared.time_terms["expert"] > alone.time_terms["expert"] == 0


LAYOUTS = [
    layout(),
    layout(dp=16, zero=3),
    layout(tp=8, pp=2, dp=2, sequence_parallel=True, zero=1),
    layout(tp=2, pp=4, micro_batches=16, schedule="interleaved", virtual_stages=2),
    layout(tp=4, dp=2, cp=4, recompute="full"),
]


@settings(max_examples=40, deadline=None)
@given(
    chosen=st.sampled_from(LAYOUTS),
    name=st.sampled_from(["a100", "h100", "ascend-910b2", "ascend-910a", "gb200", "rtx-4090", "l40s"]),
    level=st.integers(0, 1),
    factor=st.floats(1.0, 16.0),
)
def test_better_hardware_is_never_slower_nor_fuller(chosen: Layout, name: str, level: int, factor: float) -> None:
    cluster = load_cluster(name)
    work = replace(WORK, precision="fp16", counted="device")
    first = run(chosen, cluster, work)
    before = first.step_seconds * (1 + 1e-9)
    link = cluster.links[level]
    faster = replace(link, bandwidth=link.bandwidth * factor, pair_bandwidth=link.pair_bandwidth * factor)
    links = tuple(faster if index == level else one for index, one in enumerate(cluster.links))
    assert run(chosen, replace(cluster, links=links), work).step_seconds <= before
    assert run(chosen, replace(cluster, links=links), work).memory_bytes == first.memory_bytes
    quick = replace(faster, latency=link.latency / factor)
    links = tuple(quick if index == level else one for index, one in enumerate(cluster.links))
    assert run(chosen, replace(cluster, links=links), work).step_seconds <= before
    chip = replace(cluster.chip, memory_bandwidth=cluster.chip.memory_bandwidth * factor)
    assert run(chosen, replace(cluster, chip=chip), work).step_seconds <= before
    peaks = {name: peak * factor for name, peak in cluster.chip.peak_flops.items()}
    chip = replace(cluster.chip, peak_flops=peaks)
    assert run(chosen, replace(cluster, chip=chip), work).step_seconds <= before


def test_planning_imports_no_torch() -> None:
    code = "import sys, shardwise.planner.accuracy; sys.exit(len({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
