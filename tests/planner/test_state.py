"""What our runtime keeps, and when: against what its parts do (parallel/fsdp, parallel/loss, train/optim)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.planner.adapters import Lora, adapted
from shardwise.planner.cost import Estimate, estimate
from shardwise.planner.job import Candidate, Job
from shardwise.planner.known import known_costs, known_models, with_degrees
from shardwise.planner.layout import Layout, Work
from shardwise.planner.screen import groups_of, judge
from shardwise.planner.shape import Shape, model_costs
from shardwise.planner.space import enumerate_space
from shardwise.planner.state import gradients_apart
from shardwise.spec.block import Amount, ModelCosts
from shardwise.spec.cluster import load_cluster
from shardwise.spec.presets import preset_model

CLUSTER = load_cluster("a100-80gb")
BF16 = Work(2048, ours=True, counted="tensors")
FP32 = replace(BF16, precision="fp32", compute_bytes=4.0, weight_bytes=4.0, sent_weight_bytes=4.0, optimizer_bytes=8.0)
UNTIED = model_costs(Shape("plain", 4, 256, 4, 4, 64, 704, 32000))


def made(costs: ModelCosts, candidate: Candidate, micro_batches: int, work: Work = BF16) -> Estimate:
    rows = micro_batches * candidate.dp
    return estimate(costs, CLUSTER, replace(candidate, stages=_even(costs, candidate.pp)).layout(rows), work)


def _even(costs: ModelCosts, pp: int) -> tuple[int, ...]:
    return (costs.num_blocks // pp,) * pp


def test_a_last_stage_holds_a_copy_of_a_tied_embedding() -> None:
    costs = known_costs("qwen2.5-3b")[1]
    number = costs.tied_parameters
    assert number == 311_164_928
    with_copy, without = (made(one, Candidate(pp=2), 4) for one in (costs, replace(costs, tied=False)))
    for name, size in {"weights": 2, "gradients": 4, "optimizer": 12}.items():
        assert with_copy.memory_terms[1][name] - without.memory_terms[1][name] == size * number
        assert with_copy.memory_terms[0][name] == without.memory_terms[0][name]
    assert with_copy.time_terms["optimizer"] + with_copy.time_terms["data"] > 0
    alone = [made(one, Candidate(), 4).memory_bytes for one in (costs, replace(costs, tied=False))]
    assert alone[0] == alone[1]  # one device has one copy
    # Of adapters alone no gradient, no optimizer state of it.
    adapters = made(adapted(costs, Lora()), Candidate(pp=2), 4).memory_terms[1]
    assert adapters["gradients"] < 0.1 * 4 * number


def test_the_quick_judgement_counts_the_copy_too() -> None:
    model, costs = known_costs("qwen2.5-3b")
    needs = []
    for one in (costs, replace(costs, tied=False)):
        fixed = {"pp": 2, "tp": 1, "dp": 1, "cp": 1, "micro_batch_size": 1, "recompute": "none", "schedule": "1f1b"}
        job = Job(model, one, CLUSTER, 2, 8, BF16, fixed)
        (group,) = groups_of(job, enumerate_space(job, 0, 2))
        needs.append(float(judge(group, group.columns)[0].columns["need"][0]))
    # Blocks move between the two ranks, so that each has half of it.
    assert needs[0] - needs[1] == pytest.approx(18 * costs.tied_parameters / 2)


@pytest.mark.parametrize(("reshard", "pp"), [(True, 1), (False, 1), (True, 2)])
def test_gradients_stay_whole_until_the_last_micro_batch(reshard: bool, pp: int) -> None:
    """FSDP2 sums them once a step; before, each rank adds up those of all its weights."""
    split = Candidate(pp=pp, dp_shard=8, reshard=reshard)
    several = made(UNTIED, split, 4).memory_terms[0]
    held = several["optimizer"] / 12 * 8  # weights of the rank, before they are shared out
    assert several["gradients"] == pytest.approx(4 * held)
    if pp == 1:
        once = made(UNTIED, split, 1).memory_terms[0]
        assert once["gradients"] in (0, pytest.approx(4 * held / 8))


@pytest.mark.parametrize(("work", "masters"), [(BF16, 0.0), (FP32, 4.0)])
def test_weights_are_gathered_beside_their_masters(work: Work, masters: float) -> None:
    """Shards are fp32 masters, which fp32 weights are themselves; without reshard, and under a pipeline, all are
    gathered beside them through a step."""
    number = UNTIED.num_parameters
    zero2, zero3 = (
        made(UNTIED, Candidate(dp_shard=8, reshard=flag), 4, work).memory_terms[0] for flag in (False, True)
    )
    assert zero2["weights"] == pytest.approx(number * (work.weight_bytes + masters / 8))
    assert zero3["weights"] == pytest.approx(number * masters / 8)
    assert zero3["gathered"] > zero2["gathered"] > 0
    first = made(UNTIED, Candidate(pp=2, dp_shard=8, reshard=True), 4, work).memory_terms[0]
    assert first["weights"] == pytest.approx(
        first["optimizer"] / work.optimizer_bytes * (8 * work.weight_bytes + masters)
    )


def test_one_backward_pass_makes_gradients_as_activations_go() -> None:
    """Measured on the CPU, every tensor mapped by itself: 1,434 MiB for one micro-batch, 1,595 MiB for two."""
    once, twice = (made(UNTIED, Candidate(micro_batch_size=4), 4 * number) for number in (1, 2))
    gradients = twice.memory_terms[0]["gradients"]
    passing = sum(twice.memory_terms[0][name] for name in ("activations", "logits"))
    assert twice.memory_bytes - once.memory_bytes == pytest.approx(min(gradients, passing))
    layout = replace(Candidate().layout(4), num_micro_batches=np.array([1, 2]), pp=np.array([1, 1]))
    assert gradients_apart(layout, BF16).tolist() == [True, False]


def test_logits_lie_beside_the_scores_of_the_loss() -> None:
    logits = made(UNTIED, Candidate(), 1).memory_terms[0]["logits"]
    assert logits >= 2048 * 32000 * (2 + 4)


@pytest.mark.parametrize("name", known_models())
def test_no_amount_of_a_preset_is_negative(name: str) -> None:
    """Elements and bytes of a traced amount may cancel (what bf16 copies to fp32 is no copy in fp32), never to less."""
    costs = known_costs(name)[1]
    for part in (*costs.kinds, costs.embedding, costs.head):
        for amount in (part.forward_traffic, part.backward_traffic, *part.saved.values()):
            for size in (2, 4):
                assert min(_sums(amount, size)) >= -0.001 * max(_sums(amount, size))


def _sums(amount: Amount, size: int) -> list[float]:
    split = amount.split * size + amount.split_bytes
    grown = amount.split_growing * size + amount.split_growing_bytes
    experts = amount.expert * size + amount.expert_bytes
    return [split, amount.whole * size + amount.whole_bytes, grown, experts, amount.routed]


@pytest.mark.parametrize(
    ("name", "legal"),
    [("qwen2.5-7b", [1, 2, 4, 28]), ("llama2-13b", [1, 2, 4, 5, 8, 10, 20, 40]), ("deepseek-v3", [1, 2, 4, 8, 16, 32])],
)
def test_degrees_that_nobody_traced(name: str, legal: list[int]) -> None:
    model, costs = preset_model(name)
    more = with_degrees(costs, model)
    assert set(legal) <= set(more.legal_degrees())
    for part, traced in zip((*more.kinds, more.head), (*costs.kinds, costs.head), strict=True):
        new = part.degree(legal[-1])
        assert (
            new.collectives
            == max(
                (s for s in traced.degrees if legal[-1] % s.degree == 0 and not s.rule), key=lambda s: s.degree
            ).collectives
        )


def test_a_model_without_heads_keeps_its_traced_degrees() -> None:
    model = replace(known_costs("qwen3-0.6b")[0], num_heads=0, num_kv_heads=0)
    costs = preset_model("qwen3-0.6b")[1]
    assert with_degrees(costs, model).legal_degrees() == costs.legal_degrees()


@pytest.mark.parametrize(("stages", "micro_batches", "in_flight"), [((32,), 1, 1), ((16, 16), 4, 2)])
def test_each_block_keeps_a_mask_between_packed_rows(
    stages: tuple[int, ...], micro_batches: int, in_flight: int
) -> None:
    """Of [rows, length, length] numbers, for each micro-batch in flight; with full recomputation one at a time."""
    costs, cluster = model_costs(Shape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000)), load_cluster("a100")
    work = Work(2048, counted="tensors")
    layout = Layout(pp=len(stages), micro_batch=3, num_micro_batches=micro_batches, stages=stages)

    def terms(layout: Layout, packed: bool) -> dict[str, float]:
        return estimate(costs, cluster, layout, replace(work, packed=packed)).memory_terms[0]

    mask = 3 * 2048 * 2048 * 2
    plain, packed = terms(layout, False), terms(layout, True)
    assert packed.pop("masks") == pytest.approx(mask * stages[0] * in_flight)
    assert packed == pytest.approx(plain)
    again = replace(layout, recompute="full", recomputed=stages)
    plain, packed = terms(again, False), terms(again, True)
    assert packed["masks"] == 0
    assert sum(packed.values()) == pytest.approx(sum(plain.values()) + mask)
