"""The search: plans are legal, fit, come in order, and nothing that was passed over is faster."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.planner.adapters import Lora, adapted
from shardwise.planner.explain import answer, batch_equation, loss, what_would_change, why
from shardwise.planner.job import Job
from shardwise.planner.known import known_costs, known_models, with_degrees
from shardwise.planner.layout import Work
from shardwise.planner.refine import memory_need, refine
from shardwise.planner.screen import groups_of, judge
from shardwise.planner.search import search
from shardwise.planner.shape import Experts, Shape, model_costs
from shardwise.planner.space import enumerate_space
from shardwise.planner.sweep import candidate_of
from shardwise.planner.timeline import timeline
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import load_cluster
from shardwise.spec.model import ModelSpec, read_model
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.strategy import resolve

GIB = 2**30
TINY = {"intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 32000}
SHAPES = {
    "tiny": Shape("tiny", 6, 256, 4, 2, 64, 704, 32000),
    "nine": Shape("nine", 6, 288, 9, 3, 32, 704, 32000),
    "experts": Shape("experts", 6, 256, 4, 4, 64, 704, 32000, experts=Experts(8, 2, 704)),
}


@cache
def model(name: str) -> tuple[ModelSpec, ModelCosts]:
    if name not in SHAPES:
        return known_costs(name)
    shape, kind = SHAPES[name], "mixtral" if name == "experts" else "llama"
    config = {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"], **TINY}
    config |= {"hidden_size": shape.hidden, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads}
    config |= {"num_local_experts": 8, "num_experts_per_tok": 2} if shape.experts else {}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(
            json.dumps({**config, "max_position_embeddings": 4096, "tie_word_embeddings": False})
        )
        spec = read_model(folder)
    return spec, with_degrees(model_costs(shape, (1, 2)), spec)


def job(name: str = "qwen3-0.6b", devices: int = 8, rows: int = 32, memory: float = 0.0, **fixed: object) -> Job:
    spec, costs = model(name)
    return Job(spec, costs, load_cluster("a100-40gb"), devices, rows, Work(1024, ours=True), fixed, memory * GIB)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "experts", "nine"])
def test_plans_are_legal_fit_and_come_in_order(name: str) -> None:
    wanted = job(name)
    found = search(wanted)
    shown = answer(wanted, found)
    times = [plan["step_seconds"] for plan in shown["plans"]]
    assert times == sorted(times)
    assert len(times) >= 5
    for plan in found.plans:
        one = plan.candidate
        assert one.devices <= 8
        assert one.tp in shown["legal_degrees"]["tp"]
        assert one.dp * one.micro_batch_size * one.num_micro_batches(32) == 32
        assert one.num_micro_batches(32) >= one.pp
        assert (one.dp * one.cp) % one.ep == 0
        assert sum(one.stages) == wanted.costs.num_blocks
        assert memory_need(wanted, one) == plan.estimate.memory_bytes <= wanted.limit_bytes
        if not plan.not_runnable:  # by the runtime's own rules it is legal, and means the same
            Plan(wanted.model, one.strategy(), 32, "cuda")
            tree = {"model": name, "devices": one.devices, "strategy": one.fields()}
            run = parse_run({**tree, "train": {"global_batch_size": 32}})
            assert resolve(run, wanted.model, one.devices) == (one.strategy(), 32)
        else:
            assert one.cp > 1 or one.ep > 1 or one.level == "selective"
    assert any(not plan.not_runnable for plan in found.plans)


@pytest.mark.parametrize(("name", "memory"), [("tiny", 0.0), ("tiny", 2.8), ("experts", 0.0)])
def test_nothing_that_was_passed_over_is_faster(name: str, memory: float) -> None:
    """Every legal candidate of a small job, looked at stage by stage whatever its guess and its memory."""
    wanted = job(name, devices=4, rows=8, memory=memory)
    best = search(wanted, top=1).plans[0].step_seconds
    every = []
    for least, most in ((2, 4), (1, 2), (0, 1)):
        for group in groups_of(wanted, enumerate_space(wanted, least, most)):
            columns = judge(group, group.columns)[0].columns
            for index in range(len(columns["tp"])):
                plan, _ = refine(wanted, candidate_of(wanted, columns, index))
                if plan is not None:
                    every.append(plan.step_seconds)
                    assert plan.step_seconds >= columns["bound"][index] * (1 - 1e-9)
    assert len(every) > 20
    assert best <= min(every) * (1 + 1e-9)


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_devices_that_do_not_divide_the_model_are_used_by_other_axes(devices: int) -> None:
    """Three ranks do not divide four heads: the plan uses another axis, or fewer devices, and says so."""
    wanted = job("tiny", devices=devices, rows=24)
    found = search(wanted)
    assert all(plan.candidate.tp in (1, 2, 4) for plan in found.plans)
    first = found.plans[0].candidate
    assert first.devices >= devices - 1
    assert any(" idle: " in sentence for sentence in why(wanted, found)) == (first.devices < devices)
    if devices % 3 == 0:
        detail = next(one.detail for one in found.rejected if one.example == {"tp": 3})
        assert "does not divide the 4 attention heads" in detail


@pytest.mark.parametrize(
    "fixed",
    [
        {"tp": 2},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 3, "dp": 2},
        {"pp": 4, "schedule": "zero_bubble"},
        {"dp_shard": 2, "reshard": True},
        {"dp_replicate": 2},
        {"cp": 2},
        {"sequence_parallel": True},
        {"micro_batch_size": 4},
        {"virtual_stages": 2, "schedule": "interleaved"},
        {"pp": 2, "stages": (13, 15)},
    ],
    ids=str,
)
def test_given_fields_stay(fixed: dict[str, object]) -> None:
    for plan in search(job(**fixed), top=3).plans:
        assert {name: getattr(plan.candidate, name) for name in fixed} == fixed


def test_backward_passes_in_halves_win_where_stages_wait() -> None:
    """Few micro-batches, and a block a rank, so that no interleaved stages can do the same."""
    wanted = job("tiny", devices=6, rows=12, pp=6, micro_batch_size=1)
    found = search(wanted)
    first = found.plans[0]
    assert first.candidate.schedule == "zero_bubble"
    plain = search(replace(wanted, halves=False)).plans[0]
    assert plain.candidate.schedule == "1f1b"
    assert plain.estimate.bubble > first.estimate.bubble
    assert plain.step_seconds > first.step_seconds
    # The first rank, whose backward passes are whole, holds as much as before; the last one nearly as much.
    assert plain.estimate.memory_terms[0]["activations"] == first.estimate.memory_terms[0]["activations"]
    assert first.estimate.memory_terms[5]["activations"] > 3 * plain.estimate.memory_terms[5]["activations"]
    assert first.estimate.memory_bytes < 1.05 * plain.estimate.memory_bytes
    whole = {one.kind for one in timeline(wanted, first.candidate) if one.rank == 0}
    halves = {one.kind for one in timeline(wanted, first.candidate) if one.rank == 5}
    assert whole == {"forward", "backward"}
    assert halves == {"forward", "backward_input", "backward_weight"}


@pytest.mark.parametrize(("given", "level", "number"), [("full", "full", -1), (3, "full", 3), ("none", "none", -1)])
def test_given_recompute_stays(given: object, level: str, number: int) -> None:
    for plan in search(job(recompute=given), top=3).plans:
        assert (plan.candidate.level, plan.candidate.recomputed) == (level, number)


def test_as_few_blocks_as_memory_asks_for_are_computed_again() -> None:
    wanted = job("llama2-7b", devices=8, rows=64, memory=24, micro_batch_size=4)
    some = [p.candidate for p in search(wanted).plans if p.candidate.level == "full" and p.candidate.recomputed > 1]
    assert some
    for one in some:
        assert memory_need(wanted, one) <= wanted.limit_bytes
        assert memory_need(wanted, replace(one, recomputed=one.recomputed - 1)) > wanted.limit_bytes


@pytest.mark.parametrize("memory", [0.01, 1.0])
def test_a_budget_that_nothing_fits_is_refused_with_the_smallest_need(memory: float) -> None:
    with pytest.raises(PlanError, match=r"the smallest need of any split is .* GiB a device"):
        search(job(devices=1, memory=memory))


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"dp_shard": 1, "dp_replicate": 8}, "It fits without dp_replicate = 8, for example with dp_replicate = "),
        ({"tp": 1, "devices": 1}, "It fits on 4 devices"),
        (
            {"recompute": "none", "micro_batch_size": 2, "dp": 8, "rows": 16, "sequence": 8192},
            "It fits without recompute = none, for example with",
        ),
        ({"sequence": 2**20, "rows": 8}, "It fits with data.max_length="),
        ({"tp": 1, "devices": 1}, r"Or take devices of 1\d\d.* GiB"),
        ({"tp": 1, "devices": 1}, "It fits with adapters in place of all weights: use_lora=true"),
    ],
)
def test_a_refusal_names_the_cheapest_change(fixed: dict[str, object], words: str) -> None:
    defaults = {"devices": 8, "rows": 32, "sequence": 1024}
    devices, rows, sequence = (int(str(fixed.pop(name, value))) for name, value in defaults.items())
    wanted = job("llama2-7b", devices=devices, rows=rows, **fixed)
    with pytest.raises(PlanError, match=words):
        search(replace(wanted, work=replace(wanted.work, sequence=sequence)))


def test_adapters_are_proposed_where_they_fit_and_are_not_there_already() -> None:
    wanted = job("llama2-7b", devices=1, rows=32, memory=15.0)
    assert "use_lora" not in str(_refusal(wanted)), "its weights alone fill as much"
    with_adapters = replace(wanted, costs=adapted(wanted.costs, Lora()))
    assert "use_lora" not in str(_refusal(replace(with_adapters, memory_bytes=10 * 2**30)))


def _refusal(wanted: Job) -> PlanError:
    with pytest.raises(PlanError, match="the smallest need") as refusal:
        search(wanted)
    return refusal.value


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"tp": 3}, "does not divide the 4 attention heads. legal degrees: 1, 2, 4"),
        ({"ep": 2}, "the model has no experts"),
        ({"dp_shard": 5}, "does not divide the 32 rows of a step"),
        ({"dp": 5}, "dp x micro_batch_size does not divide the 32 rows of a step"),
        ({"pp": 7}, "the model has 6 blocks"),
        ({"stages": (3, 4)}, "sums to 7, and the model has 6 blocks. For example [3, 3]"),
        ({"sequence_parallel": True, "tp": 1}, "strategy.tp is 1"),
        ({"schedule": "zero_bubble", "pp": 1}, "strategy.pp is 1"),
        ({"cp": 3}, "2 x cp does not divide the 1024 tokens"),
        ({"tp": 4, "pp": 6}, "strategy.pp = 6, strategy.tp = 4: takes 24 devices, and 12 are given. Use devices=24"),
        ({"recompute": 40}, "strategy.recompute = 40: the model has 6 blocks. Use full, or at most 6"),
        ({"recompute": 4, "pp": 2}, "the largest stage has 3 blocks. Use full, or at most 3"),
    ],
)
def test_a_given_degree_that_is_illegal_is_refused_with_its_rule(fixed: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError) as refused:
        search(job("tiny", devices=12, **fixed))
    assert words in str(refused.value)


def step(wanted: Job) -> float:
    return search(wanted, top=1).plans[0].step_seconds


@settings(max_examples=7, deadline=None)
@given(
    where=st.sampled_from([(name, chip) for name in ("tiny", "nine", "experts") for chip in ("a100-40gb", "rtx-4090")]),
    lora=st.booleans(),
    fixed=st.sampled_from([{}, {}, {"pp": 2, "stages": (4, 2)}, {"schedule": "zero_bubble"}, {"recompute": "none"}]),
    memory=st.sampled_from([4.0, 6.0, 12.0]),
    devices=st.integers(2, 9),
    rows=st.sampled_from([8, 12, 30]),
    factor=st.floats(1.0, 8.0),
    more=st.integers(1, 9),
)
def test_more_memory_faster_links_or_more_devices_are_never_slower(
    where: tuple[str, str],
    lora: bool,
    fixed: dict[str, object],
    memory: float,
    devices: int,
    rows: int,
    factor: float,
    more: int,
) -> None:
    name, chip = where
    wanted = replace(job(name, devices, rows, memory, **fixed), cluster=load_cluster(chip))
    if lora:
        wanted = replace(wanted, costs=adapted(wanted.costs, Lora()))
    links = tuple(replace(link, bandwidth=factor * link.bandwidth) for link in wanted.cluster.links)
    try:
        before = step(wanted) * (1 + 1e-9)
    except PlanError:
        return
    assert step(replace(wanted, memory_bytes=factor * wanted.memory_bytes)) <= before
    assert step(replace(wanted, cluster=replace(wanted.cluster, links=links))) <= before
    assert step(replace(wanted, devices=devices + more)) <= before


def test_schedules_that_last_as_long_give_way_to_the_simplest() -> None:
    """On shared cores no bubble costs anything, so nothing but order decides between the schedules of one cut."""
    wanted = job("tiny", devices=3, rows=12, pp=3, micro_batch_size=1)
    shared = replace(wanted, cluster=replace(wanted.cluster, chip=replace(wanted.cluster.chip, shared=3.0)))
    first = search(shared).plans[0].candidate
    assert (first.schedule, first.virtual_stages) == ("1f1b", 1)
    assert search(wanted).plans[0].candidate.schedule != "1f1b"  # with a core for each rank the bubble counts


def test_the_table_shows_plans_that_differ_and_counts_each_rejection_once() -> None:
    wanted = job("tiny", devices=12, rows=24)
    found = search(wanted)
    degrees = [tuple(getattr(plan.candidate, name) for name in ("pp", "dp", "cp", "tp", "ep")) for plan in found.plans]
    assert len(set(degrees)) == len(degrees) >= 5
    tensor = {one.example["tp"]: one.number for one in found.rejected if one.rule == "tensor degree"}
    assert tensor[3] == 3  # 3, 6 and 12, by one rule
    assert answer(wanted, found)["legal_degrees"]["cp"] == [1, 2]


def test_reasons_are_those_of_the_terms() -> None:
    wanted = job()
    found = search(wanted)
    first, second = found.plans[:2]
    assert f"{second.step_seconds / first.step_seconds - 1:.1%}" in loss(first, second)
    assert batch_equation(wanted, first.candidate).startswith("global batch 32 rows = ")
    less_memory = what_would_change(wanted, found)[0]
    assert less_memory.startswith("with a quarter less memory: ")


def test_more_devices_than_any_split_can_use() -> None:
    few, many = job("tiny", devices=64, rows=8), job("tiny", devices=10**11, rows=8)
    assert search(many, top=1).plans[0].step_seconds <= search(few, top=1).plans[0].step_seconds


def test_memory_does_not_grow_with_micro_batches() -> None:
    """1F1B holds as many micro-batches as there are stages behind, however many a step has."""
    found = [search(job(rows=2 * number, pp=2, dp=1, tp=1, micro_batch_size=2, recompute="none", schedule="1f1b"))
             for number in (4, 8, 16)]  # fmt: skip
    assert len({plan.plans[0].estimate.memory_terms[0]["activations"] for plan in found}) == 1


def test_well_known_models_have_their_sizes() -> None:
    assert {"llama2-70b", "deepseek-v3", "gpt3-175b"} <= set(known_models())
    sizes = {name: known_costs(name)[1].num_parameters for name in ("llama2-70b", "deepseek-v3", "gpt3-175b")}
    assert sizes == pytest.approx({"llama2-70b": 68.98e9, "deepseek-v3": 671e9, "gpt3-175b": 174.6e9}, rel=2e-3)


def test_every_rank_has_a_part_of_an_odd_vocabulary() -> None:
    """GPT-3's 50,257 words over 16 ranks."""
    embedding = known_costs("gpt3-175b")[1].embedding
    assert embedding.degree(16).whole is None
    assert [one.op for one in embedding.degree(16).collectives] == ["all_reduce"]


@pytest.mark.parametrize(("name", "hidden", "chosen"), [("mixtral-8x7b", 4096, 2), ("qwen3-30b-a3b", 2048, 8)])
def test_hidden_states_of_experts_are_whole_on_every_tensor_rank(name: str, hidden: int, chosen: int) -> None:
    """What is as wide as an expert is cut; a token's copies for its experts are not."""
    block = known_costs(name)[1].kinds[-1]
    assert block.saved["none"].routed >= chosen * hidden
    assert block.forward_traffic.routed > 2 * chosen * hidden
    assert block.saved["none"].expert > 0


def test_the_best_plan_that_can_run_is_found_however_few_are_told() -> None:
    """The faster ones of this model need expert parallelism."""
    wanted = replace(job("mixtral-8x7b", devices=16, rows=128), work=Work(4096, ours=True))
    wanted = replace(wanted, cluster=load_cluster("a100-80gb"))
    found = [[plan for plan in search(wanted, top=top).plans if not plan.not_runnable] for top in (1, 5)]
    assert found[0]
    assert found[0][0].candidate == found[1][0].candidate
