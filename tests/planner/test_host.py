"""Processes that share the cores of one machine: what their estimates and their search add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from benchmarks.measured_plans import legal_plans
from shardwise.front.planning import work_of
from shardwise.launch import heap
from shardwise.measure.profile import profile_of
from shardwise.planner import host
from shardwise.planner.adapters import Lora, adapted
from shardwise.planner.cost import Estimate, estimate
from shardwise.planner.data import data_seconds
from shardwise.planner.host import KEPT_BESIDE_GATHERS, on_cluster
from shardwise.planner.job import USABLE_MEMORY, Candidate, Job
from shardwise.planner.layout import Layout
from shardwise.planner.refine import _fits, memory_need, refine
from shardwise.planner.screen import groups_of, judge
from shardwise.planner.search import search
from shardwise.planner.shape import Shape, model_costs
from shardwise.planner.space import enumerate_space
from shardwise.planner.sweep import candidate_of
from shardwise.spec.block import Parameters
from shardwise.spec.cluster import ClusterSpec, load_cluster
from shardwise.spec.run import TrainConfig
from tests.measure.made_samples import made_samples
from tests.spec.model_folder import make_spec


def cluster(cores: int) -> ClusterSpec:
    return ClusterSpec.from_json(profile_of(made_samples(4, cores), "made"))


def heap_of_weights(terms: dict[str, float], layout: Layout) -> float:
    """What the heap keeps of a rank's blocks, without what its logits, its workspace and the passes of a head leave."""
    others = host.heap_of_others(layout, terms["logits"] + terms["workspace"])
    return terms["heap"] - float(others) - float(host.heap_of_head(layout))


def job(cores: int = 2, vocab: int = 512, rows: int = 8) -> Job:
    shape = Shape("tiny", 4, 64, 4, 2, 16, 128, vocab)
    on = cluster(cores)
    work = on_cluster(work_of(64, "fp32", TrainConfig()), on)
    with TemporaryDirectory() as folder:
        model = make_spec(Path(folder), hidden_size=64, intermediate_size=128, vocab_size=vocab)
    return Job(model, model_costs(shape, (1, 2, 4)), on, 4, rows, work, all_devices=True)


@pytest.mark.parametrize("candidate", [Candidate(pp=4, stages=(1, 1, 1, 1)), Candidate(pp=2, tp=2, stages=(3, 1))])
def test_who_waits_leaves_the_core_to_others(candidate: Candidate) -> None:
    shared, alone = job(2), job(4)
    layout = candidate.layout(shared.rows)
    slow = replace(alone.cluster, chip=replace(alone.cluster.chip, shared=1.0))
    fast = replace(slow, chip=replace(slow.chip, shared=2.0))
    costs = [estimate(shared.costs, on, layout, shared.work) for on in (slow, fast)]
    assert all(min(cost.time_terms.values()) >= 0 for cost in costs)
    work = sum(costs[0].time_terms.values()) - costs[0].time_terms["bubble"]
    assert costs[1].step_seconds < costs[0].step_seconds
    assert costs[1].step_seconds >= costs[0].step_seconds / 2
    assert costs[1].time_terms["bubble"] <= costs[0].time_terms["bubble"]
    assert work > 0
    assert 0 <= costs[1].bubble <= costs[0].bubble < 1


@pytest.mark.parametrize(("cores", "vocab", "rows"), [(2, 512, 8), (1, 8192, 12), (4, 512, 16)])
def test_the_search_finds_the_fastest_of_all_legal_plans(cores: int, vocab: int, rows: int) -> None:
    wanted = job(cores, vocab, rows)
    found = search(wanted, top=1, only_runnable=True).plans[0]
    best = legal_plans(wanted)[0]
    assert found.candidate.devices == 4
    assert found.step_seconds <= best.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("cores", [1, 2])
def test_bounds_hold_where_processes_share_cores(cores: int) -> None:
    wanted = job(cores)
    for group in groups_of(wanted, enumerate_space(wanted, 3, 4)):
        columns = judge(group, group.columns)[0].columns
        for index in range(len(columns["tp"])):
            plan, _ = refine(wanted, candidate_of(wanted, columns, index))
            if plan is not None:
                assert plan.step_seconds >= columns["bound"][index] * (1 - 1e-9)


def test_memory_counts_what_a_process_has_above_its_imports() -> None:
    wanted = job()
    candidate = Candidate(tp=2, dp_replicate=2, micro_batch_size=2, stages=(4,))
    terms = estimate(wanted.costs, wanted.cluster, candidate.layout(8), wanted.work).memory_terms[0]
    assert "slack" not in terms
    assert terms["base"] < 2**24
    going = sum(terms[name] for name in ("gradients", "activations", "logits", "workspace"))
    assert 0.3 * going < terms["heap"] - host._TENSOR_BYTES - 2 * host._HEAD_BYTES < 0.6 * going
    assert on_cluster(wanted.work, load_cluster("a100-80gb")) is wanted.work
    assert KEPT_BESIDE_GATHERS == heap._GATHERED_BYTES, "written twice: workers load no planner"


def test_buffers_of_small_units_find_no_hole_in_the_heap_and_those_of_large_ones_are_mapped() -> None:
    """What is gathered more often leaves more of them; what is mapped takes the time of making its pages."""
    small = job()
    large = replace(small, costs=model_costs(Shape("large", 4, 1024, 4, 2, 256, 4096, 512), (1, 2, 4)))
    terms: dict[tuple[int, bool], Estimate] = {}
    for number, one in enumerate((small, large)):
        for reshard in (False, True):
            candidate = Candidate(dp_shard=4, reshard=reshard, micro_batch_size=1, stages=(4,))
            terms[number, reshard] = estimate(one.costs, one.cluster, candidate.layout(8), one.work)
    layout = Candidate(dp_shard=4, micro_batch_size=1, stages=(4,)).layout(8)
    heap = {key: heap_of_weights(made.memory_terms[0], layout) for key, made in terms.items()}
    blocks = sum(kind.parameters.total for kind in small.costs.kinds) * 4 * 4.0
    assert 2 * blocks < heap[0, False] < heap[0, True] < 6 * blocks
    weights = large.costs.num_parameters * 4.0
    assert heap[1, False] < 0.3 * weights
    rate = large.cluster.chip.memory_bandwidth * large.cluster.chip.bandwidth_efficiency
    unmapped = replace(large.work, host=replace(large.work.host, mapped=0.0))
    candidate = Candidate(dp_shard=4, micro_batch_size=1, stages=(4,))
    quick = estimate(large.costs, large.cluster, candidate.layout(8), unmapped)
    assert terms[1, False].step_seconds - quick.step_seconds > 5 * weights / rate


@pytest.mark.parametrize("hidden", [64, 1024])
def test_frozen_weights_are_gathered_and_never_summed(hidden: int) -> None:
    """Blocks below and above what the heap maps by itself: of adapters, sums are as small as they are."""
    wanted = job()
    whole = model_costs(Shape("any", 4, hidden, 4, 2, hidden // 4, 4 * hidden, 512), (1, 2, 4))
    layout = Candidate(dp_shard=4, reshard=False, micro_batch_size=1, stages=(4,)).layout(8)
    found = {}
    for name, costs in (("whole", whole), ("adapters", adapted(whole, Lora(1)))):
        sums, gathers = data_seconds([(costs.kinds[0], 4, "none")], layout, wanted.work, wanted.cluster)
        terms = estimate(costs, wanted.cluster, layout, wanted.work).memory_terms[0]
        found[name] = (sums, gathers, terms["gathered"], heap_of_weights(terms, layout))
    latency, same = data_seconds([(replace(whole.kinds[0], trainable=Parameters()), 4, "none")], layout, wanted.work,
                                 wanted.cluster)  # fmt: skip
    assert found["whole"][1] == pytest.approx(same)
    assert found["adapters"][1] >= same
    for index, least in ((0, latency), (2, 0.0)):
        assert found["adapters"][index] - least < 0.2 * (found["whole"][index] - least)
    if hidden == 64:
        assert found["adapters"][3] < 0.4 * found["whole"][3]


def test_the_rank_with_the_head_keeps_more_for_each_pass_up_to_what_was_measured() -> None:
    heaps = []
    for rows in (4, 8, 16, 32):
        wanted = job(rows=rows)
        layout = Candidate(pp=2, tp=2, micro_batch_size=1, stages=(3, 1)).layout(rows)
        terms = estimate(wanted.costs, wanted.cluster, layout, wanted.work).memory_terms
        heaps.append([one["heap"] for one in terms])
    assert len({first for first, _ in heaps}) == 1, "the first rank's does not depend on their number"
    assert heaps[1][1] - heaps[0][1] == pytest.approx(4 * host._HEAD_BYTES)
    assert heaps[1][1] == heaps[2][1] == heaps[3][1]


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_sum_of_the_ends_takes_what_the_passes_left(reshard: bool, micro: int) -> None:
    """FSDP2 sums them last: their gradients, which ``gradients`` has whole, and one copy of them at a time."""
    wanted = job(vocab=2**15)
    layout = Candidate(dp_shard=4, reshard=reshard, micro_batch_size=micro, stages=(4,)).layout(8)
    terms = estimate(wanted.costs, wanted.cluster, layout, wanted.work).memory_terms[0]
    ends = 4.0 * (wanted.costs.embedding.trainable.total + wanted.costs.head.trainable.total)
    assert terms["gradients"] > ends
    passing = sum(terms[name] for name in ("activations", "logits", "workspace", "gathered"))
    assert passing >= ends
    blocks = 4.0 * max(kind.parameters.total for kind in wanted.costs.kinds)
    assert terms["gathered"] <= ends + 5 * blocks


def test_the_heap_of_shared_weights_is_less_under_a_pipeline() -> None:
    """Activations of several micro-batches leave room for the buffers of sums, in both judgements."""
    wanted = replace(job(rows=16), fixed={"pp": 2, "tp": 1, "dp_shard": 2, "micro_batch_size": 2})
    wanted = replace(wanted, work=replace(wanted.work, sequence=512))
    seen = 0
    for group in groups_of(wanted, enumerate_space(wanted, 3, 4)):
        columns = judge(group, group.columns)[0].columns
        for index in range(len(columns["tp"])):
            plan, _ = refine(wanted, candidate_of(wanted, columns, index))
            if plan is not None:
                seen += 1
                assert columns["need"][index] <= plan.estimate.memory_bytes * 1.02
    assert seen


def test_what_tensor_ranks_send_is_counted_once_in_a_cut() -> None:
    wanted = job(vocab=8192)
    candidate = Candidate(pp=2, tp=2, micro_batch_size=1, stages=(2, 2))
    need = memory_need(wanted, candidate)
    close = replace(wanted, memory_bytes=(need + host._TENSOR_BYTES / 2) / USABLE_MEMORY)
    assert _fits(close, candidate, candidate.layout(close.rows))(1, 2, 4)


@pytest.mark.parametrize(("vocab", "off"), [(512, 0.05), (8192, 0.1)])
def test_the_quick_judgement_counts_what_the_heap_keeps(
    vocab: int, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what the head's passes leave: it takes blocks to move until ranks are alike, and 17 MB outweigh these."""
    monkeypatch.setattr(host, "_HEAD_BYTES", 0.0)
    wanted = job(vocab=vocab)
    for group in groups_of(wanted, enumerate_space(wanted, 3, 4)):
        columns = judge(group, group.columns)[0].columns
        for index in range(0, len(columns["tp"]), 3):
            plan, _ = refine(wanted, candidate_of(wanted, columns, index))
            if plan is not None:
                assert columns["need"][index] == pytest.approx(plan.estimate.memory_bytes, rel=off)
