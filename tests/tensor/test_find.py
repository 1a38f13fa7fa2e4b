"""Tables are found from what modules do, not from what they are called, and proven on simulated ranks."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import PlanError
from shardwise.models.shrink import build_small, shrink
from shardwise.spec.tolerance import FLOAT64_GRADIENT, PROOF
from shardwise.tensor.experts import find_expert_cuts
from shardwise.tensor.find import find_table
from shardwise.tensor.parts import Part
from shardwise.tensor.simulate import compare, reference
from shardwise.tensor.table import ModuleSplit, ParamCut, ShardingTable, Style
from tests.parallel.families import family_config
from tests.tensor.custom import Custom, Fed, OddBlock, Repeating, RepeatingBlock, StubbornBlock, small

C, R = Style.COLUMN, Style.ROW
LLAMA = {"self_attn.q_proj": C, "self_attn.k_proj": C, "self_attn.v_proj": C, "self_attn.o_proj": R}
LLAMA |= {"mlp.gate_proj": C, "mlp.up_proj": C, "mlp.down_proj": R}


def _parts(*sizes: int) -> tuple[Part, ...]:
    return tuple(map(Part, sizes))


def _found(model: Any, degree: int = 2) -> tuple[ShardingTable, dict[str, ModuleSplit]]:
    """The table, and the splits of the first block under short names."""
    table = find_table(model, model, degree)
    blocks = next(name for name in table.modules if ".0." in name).split(".0.")[0]
    prefix = f"{blocks}.0."
    return table, {n.removeprefix(prefix): s for n, s in table.modules.items() if n.startswith(prefix)}


def _family(name: str, **changes: Any) -> Any:
    return build_small(family_config(name, **changes))


def test_llama_like_blocks_get_the_obvious_table():
    table, found = _found(_family("mistral"))
    assert {name: split.style for name, split in found.items()} == LLAMA
    groups = {name: split.group.rpartition(".")[2] for name, split in found.items()}
    assert groups["self_attn.k_proj"] == groups["self_attn.v_proj"] == "q_proj"
    assert groups["mlp.up_proj"] == "gate_proj"
    assert table.style("model.embed_tokens") is Style.VOCAB_EMBEDDING
    assert table.style("lm_head") is Style.VOCAB_HEAD


def test_gpt2_is_split_by_parts_and_reads_its_own_width():
    table, found = _found(_family("gpt2"))
    assert found["attn.c_attn"] == ModuleSplit(C, _parts(32, 32, 32), "transformer.h.0.attn.c_attn")
    assert found["attn.c_proj"].style is R
    assert [value.attribute for value in table.values["transformer.h.0.attn"]] == ["split_size"]


def test_norms_over_heads_are_partial_or_cut_by_heads():
    table, _ = _found(_family("gemma3_text"))
    assert table.params["model.layers.0.self_attn.q_norm.weight"] == ParamCut()
    table, _ = _found(_family("cohere", use_qk_norm=True))  # a weight for each head
    assert table.params["model.layers.0.self_attn.q_norm.weight"] == ParamCut(0, _parts(4))


def test_norms_over_all_heads_make_the_attention_gathered():
    table, found = _found(_family("olmo2"))
    assert found["self_attn.q_proj"].style is Style.COLUMN_GATHER
    assert found["mlp.gate_proj"].style is C
    assert table.is_cut("model.layers.0.self_attn.o_proj.weight")


def test_fewer_key_value_heads_than_ranks_share_them():
    table, found = _found(_family("mistral"), degree=4)
    assert found["self_attn.k_proj"].parts == (Part(16, 2),)
    assert table.values["model.layers.0.self_attn"]


def test_one_key_head_in_a_fused_weight_is_held_by_every_rank():
    """Falcon's multi-query attention: query rows of each rank, then the key and value rows of all."""
    table, found = _found(_family("falcon"))
    assert found["self_attention.query_key_value"].style is C
    assert found["self_attention.query_key_value"].parts[-1].units == 1
    assert found["self_attention.dense"].style is R
    assert table.values


def test_experts_are_split_inside():
    table, found = _found(_family("qwen3_moe"))
    assert found["mlp.experts"].style is Style.EXPERTS
    assert table.params["model.layers.0.mlp.experts.gate_up_proj"] == ParamCut(1, _parts(16, 16))
    assert table.params["model.layers.0.mlp.experts.down_proj"] == ParamCut(2, _parts(16))


@pytest.mark.parametrize("tied", [False, True])
def test_a_custom_block_in_an_unusual_order(tied):
    model = small(Custom([OddBlock(), OddBlock()], tied=tied))
    table, found = _found(model)
    assert found["vkq"].parts == _parts(24, 24, 24)
    assert found["up_and_gate"].parts == _parts(40, 40)
    assert {n: s.style for n, s in found.items()} == {"vkq": C, "mix": R, "up_and_gate": C, "down": R}
    assert found["vkq"].group == found["up_and_gate"].group  # one sum for the input of both
    assert table.params["blocks.0.temperature"] == ParamCut(0, _parts(4))
    assert compare(model, table, reference(model)).error <= FLOAT64_GRADIENT


def test_a_forward_that_insists_on_whole_shapes_is_gathered():
    model = small(Custom([StubbornBlock(), StubbornBlock()]))
    table, found = _found(model)
    assert Style.COLUMN not in {split.style for split in found.values()}
    assert table.is_cut("blocks.0.qkv.weight")
    assert table.is_cut("blocks.0.out.weight")


def test_a_block_that_runs_twice_is_right_or_refused():
    block = OddBlock()
    model = small(Custom([block, block]))
    try:
        table = find_table(model, model, 2)
    except PlanError as error:
        assert "tp=1" in str(error) or "not available" in str(error)
    else:
        assert compare(model, table, reference(model)).error <= FLOAT64_GRADIENT


def test_a_wrong_table_is_seen():
    model = _family("gemma3_text")
    table = find_table(model, model, 2)
    want = reference(model)
    assert compare(model, table, want).error <= PROOF
    norm = "model.layers.0.self_attn.q_norm.weight"
    whole = replace(table, params={name: cut for name, cut in table.params.items() if name != norm})
    assert compare(model, whole, want).where == norm  # its gradient stays a share
    name = "model.layers.1.mlp.gate_proj"
    unsummed = replace(table, modules=dict(table.modules) | {name: replace(table.modules[name], group="")})
    assert compare(model, unsummed, want).error > PROOF


def test_the_parts_of_the_real_model_follow_its_sizes():
    config = family_config("phi3", hidden_size=64, intermediate_size=96)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    table = find_table(real, _family("phi3"), 2)
    assert table.modules["model.layers.3.self_attn.qkv_proj"].parts == _parts(64, 32, 32)
    assert table.modules["model.layers.3.mlp.gate_up_proj"].parts == _parts(96, 96)


def test_parts_of_unlike_proportions_are_told_by_the_configuration():
    """Mamba 2 holds gate, inputs, two states and steps side by side: 2 x 8192, 2 x 8 groups of 128, 128 heads."""
    config = AutoConfig.for_model("mamba2", num_hidden_layers=2)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    table = find_table(real, build_small(shrink(config)), 2)
    assert table.modules["backbone.layers.0.mixer.in_proj"].parts == _parts(8192, 8192, 1024, 1024, 128)


def test_what_parameters_outside_of_a_block_feed_stays_whole():
    """Other blocks may read the same whole: no rank may have a share of its gradient."""
    model = small(Fed())
    table, found = _found(model)
    assert Style.COLUMN not in {split.style for split in found.values()}
    assert compare(model, table, reference(model)).error <= FLOAT64_GRADIENT


def test_what_experts_hand_on_without_matrices_counts_once():
    """Each rank would add it."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for repeated in (0.0, 1.0):
        cuts = find_expert_cuts(Repeating().double(), (x, repeated), {}, 2)
        assert cuts is not None
        assert {name: cut.dim for name, cut in cuts.items()} == {"down": 2, "up": 1}
        assert any(cut.once for cut in cuts.values()) is (repeated != 0.0)
    model = small(Custom([RepeatingBlock(), RepeatingBlock()]))
    table, found = _found(model)
    assert found["experts"].style is Style.EXPERTS
    assert compare(model, table, reference(model)).error <= FLOAT64_GRADIENT


def test_json_round_trip():
    table, _ = _found(_family("gpt2"))
    assert ShardingTable.from_json(table.to_json()) == table
    with pytest.raises(PlanError, match="damaged"):
        ShardingTable.from_json({"degree": 2})


def test_what_moves_is_what_the_table_says():
    """Elements a rank sends for each token, counted on the simulated ranks: blocks, embedding and head."""
    model = _family("mistral")
    table = find_table(model, model, 2)
    assert table.cost is not None
    moved = sum(compare(model, table, reference(model)).moved.values()) / (2 * 8)
    ends = 2 * 32 / 2 * 2  # an all-reduce of the embedded, one of the gradient before the head
    assert moved == table.cost.forward + table.cost.backward + ends


class _Counted(TorchFunctionMode):
    """Counts linear layers by the thread that runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.threads[threading.get_ident()] += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_the_modes_of_the_whole_model_hold_on_the_simulated_ranks():
    """A check keeps float64 from being rounded by one: some routers run in no other precision beside it."""
    model = _family("mistral")
    table, _ = _found(model)
    want = reference(model)
    with _Counted() as mode:
        compare(model, table, want)
    counts = [count for thread, count in mode.threads.items() if thread != threading.get_ident()]
    assert len(counts) == 2
    assert counts[0] == counts[1] > 0
