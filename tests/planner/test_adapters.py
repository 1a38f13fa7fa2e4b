"""Adapters, product by product: their numbers, where tensor ranks cut them, what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import ConfigError
from shardwise.front.planning import trained
from shardwise.planner.adapters import Lora, adapted, adapter_parameters
from shardwise.planner.compute import amount_bytes, rank_parameters
from shardwise.planner.cost import estimate
from shardwise.planner.known import known_costs
from shardwise.planner.layout import Layout, Work
from shardwise.spec.cluster import load_cluster
from shardwise.spec.rules import parse_run

LLAMA = known_costs("llama2-7b")[1]


@pytest.mark.parametrize(
    ("lora", "number"),
    [  # as peft prints them for this model
        (Lora(8), 19_988_480),
        (Lora(16), 39_976_960),
        (Lora(8, ("q_proj", "v_proj")), 4_194_304),
        (Lora(8, r".*\.(q|v)_proj"), 4_194_304),
        (Lora(8, r"model\.layers\.(1\d|2\d)\..*(q|v)_proj"), 2_621_440),  # 20 of 32 blocks
        (Lora(8, ("model.layers.3.self_attn.q_proj", "layers.4.self_attn.v_proj")), 131_072),
        (Lora(8, ("q_proj", "lm_head")), 2_097_152 + 8 * (4096 + 32000)),
    ],
    ids=str,
)
def test_numbers_of_adapters(lora: Lora, number: int) -> None:
    costs = adapted(LLAMA, lora)
    assert adapter_parameters(costs) == number
    kinds = [costs.kinds[kind] for kind in costs.order]
    assert sum(part.trainable.total for part in (*kinds, costs.embedding, costs.head)) == number
    assert costs.num_parameters == LLAMA.num_parameters + number
    assert adapter_parameters(LLAMA) is None


def test_the_half_at_the_cut_is_cut() -> None:
    """B of a layer whose outputs are cut, A of one whose inputs are; the other halves are whole on every rank."""
    block = adapted(LLAMA, Lora(8)).kinds[0]
    outputs, inputs = 3 * 4096 + 2 * 11008, 4096 + 11008
    cut, whole = 8 * (outputs + inputs), 8 * (5 * 4096 + 2 * 4096)
    assert rank_parameters(block.trainable, block, Layout(tp=4)) == cut / 4 + whole


def test_weights_that_a_degree_holds_whole_do_not_make_adapters_larger() -> None:
    """Key and value heads fewer than ranks: frozen, so adapters stay what they are without."""
    kind = LLAMA.kinds[0]
    number = kind.parameters.whole + 10_000_000
    degrees = tuple(replace(one, whole=number) if one.degree == 4 else one for one in kind.degrees)
    held = adapted(replace(LLAMA, kinds=(replace(kind, degrees=degrees),)), Lora(8)).kinds[0]
    plain = adapted(LLAMA, Lora(8)).kinds[0]
    layout = Layout(tp=4)
    assert rank_parameters(held.trainable, held, layout) == rank_parameters(plain.trainable, plain, layout)
    more = rank_parameters(held.parameters, held, layout) - rank_parameters(plain.parameters, plain, layout)
    assert more == 10_000_000 * 3 / 4


def test_modules_that_train_whole() -> None:
    costs = adapted(LLAMA, Lora(8, ("q_proj",), ("embed_tokens", "lm_head")))
    assert costs.embedding.trainable == LLAMA.embedding.trainable
    assert costs.head.trainable == LLAMA.head.trainable
    tied = known_costs("qwen3-0.6b")[1]
    both = adapted(tied, Lora(8, ("q_proj",), ("embed_tokens",)))
    assert both.head.products[0].trainable  # one weight


def test_a_higher_rank_costs_more() -> None:
    cluster, work = load_cluster("a100-80gb"), Work(2048, ours=True)
    made = [estimate(adapted(LLAMA, Lora(rank)), cluster, Layout(), work) for rank in (8, 64)]
    few, many = (one.memory_terms[0] for one in made)
    assert many["optimizer"] == pytest.approx(8 * few["optimizer"])
    assert made[0].step_seconds < made[1].step_seconds < 1.2 * made[0].step_seconds


def test_dropout_keeps_an_input_and_a_mask_for_each_adapter() -> None:
    run = parse_run({"model": "m", "lora": {"target_modules": ["q_proj", "down_proj"], "dropout": 0.1}})
    plain = parse_run({"model": "m", "lora": {"target_modules": ["q_proj", "down_proj"]}})
    layout, work = Layout(tp=2), Work(2048, ours=True)
    with_masks, without = (trained(one, LLAMA).kinds[0] for one in (run, plain))
    for level, more in (("none", 4096 + 11008 / 2), ("full", 0)):
        kept = [amount_bytes(one.saved[level], layout, work) for one in (with_masks, without)]
        assert kept[0] - kept[1] == pytest.approx(2048 * more * (2 + 1))


@pytest.mark.parametrize("targets", [("nope",), "nope.*", ("q_proj", "k_prj")])
def test_a_target_that_is_no_layer_is_refused(targets: str | tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"matches no linear layer\. Names here: q_proj, k_proj"):
        adapted(LLAMA, Lora(8, targets))
