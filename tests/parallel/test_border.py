"""What crosses a border has the form that a tensor rank holds, and is refused where none is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.errors import PlanError
from shardwise.models.chain import find_chain
from shardwise.models.shrink import build_small, shrink
from shardwise.models.structure import find_structure
from shardwise.parallel.border import Received, local_shapes, need_gradients
from shardwise.parallel.pipeline import Absent, StageCut, cut_modules
from shardwise.tensor.find import find_table
from shardwise.tensor.table import ModuleSplit, ShardingTable, Style
from tests.architectures.survey import default_config
from tests.parallel.families import family_config


@pytest.fixture(scope="module")
def whole():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config("gemma3n_text"))
    structure = find_structure(model)
    return model, structure, find_chain(model, structure)


def test_keys_and_values_are_those_of_the_ranks_heads(whole):
    model, structure, chain = whole
    styles = {"q_proj": Style.COLUMN, "k_proj": Style.COLUMN, "v_proj": Style.COLUMN, "o_proj": Style.ROW}
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in styles]
    table = ShardingTable(2, {name: ModuleSplit(styles[name.rpartition(".")[2]]) for name in names})
    shapes = local_shapes(model, structure, chain, table, 1)
    state, *further = chain.border(2)
    assert shapes[state].sizes == (4, "rows", "length", 32)
    assert {value.module.rpartition(".")[2]: shapes[value].sizes for value in further} == {
        "embed_tokens_per_layer": ("rows", "length", 32),
        "per_layer_projection_norm": ("rows", "length", 4, 8),
        "0": ("rows", 1, "length", 8),
        "1": ("rows", 1, "length", 8),
    }
    assert {value.shape.sizes for value in further if value.place[0] == "written"} == {("rows", 2, "length", 8)}


def test_a_gradient_is_sent_where_something_trains_before(whole):
    chain = whole[2]
    border = chain.border(2)
    trained = {"model.layers.1.self_attn.v_proj.weight"}
    needed = {value.module for value, needs in zip(border, need_gradients(border, True, trained), strict=True) if needs}
    assert needed == {"model.layers.1"}  # its hidden state and its values, neither the inputs nor block 0
    assert not any(need_gradients(border, False, trained))


def test_a_sequence_that_is_cut_hands_over_no_part_of_it():
    """RoFormer's table of positions is whole on every rank; a hidden state that later blocks read is not."""
    small = shrink(default_config("roformer"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    structure = find_structure(model)
    chain = find_chain(model, structure)
    table = find_table(model, build_small(small), 2, sequence=True)
    shapes = local_shapes(model, structure, chain, table, 1)
    state, places = chain.border(1)
    assert shapes[state].sizes == ("rows", "length", small.hidden_size)
    assert shapes[places].sizes[0] == "length"
    far = replace(chain, hidden={0: replace(chain.hidden[0], last=2), **dict(list(chain.hidden.items())[1:])})
    with pytest.raises(PlanError, match=r"sequence_parallel = true with pp above 1.*Use sequence_parallel=false"):
        local_shapes(model, structure, far, table, 0)


def test_weights_that_a_model_takes_from_an_absent_module_are_zeros_without_memory():
    received = Received(())
    with torch.device("meta"):
        embedding = torch.nn.Embedding(262_144, 2048, dtype=torch.bfloat16)
    absent = Absent(embedding, None, "embed_tokens", received)
    row = absent.weight[3]
    assert row.shape == (2048,)
    assert row.dtype == torch.bfloat16
    assert not row.any()
    assert absent.weight.untyped_storage().nbytes() == 2
    assert absent.num_embeddings == 262_144
    assert not list(absent.parameters())


def test_a_weight_that_is_read_behind_the_stages_own_blocks_is_refused():
    """Zeros would count there: nothing that was received replaces what is made of them."""
    model = AutoModelForCausalLM.from_config(family_config("gpt2"))
    structure = find_structure(model)
    chain = find_chain(model, structure)
    last = structure.num_blocks
    stage = cut_modules(model, structure, chain, StageCut(last - 1, last, 1))
    state, positions = torch.randn(2, 5, model.config.hidden_size), torch.arange(5).expand(2, 5)
    embedding, blocks = model.get_submodule(structure.embedding), model.get_submodule(structure.blocks)

    def read(*_):
        found.append(float(embedding.weight.sum()))

    found = []
    blocks[0].register_forward_pre_hook(read)  # nothing of this comes to the stage's own block
    for _ in range(2):
        assert stage(state, position_ids=positions).isfinite().all()
    assert found == [0, 0]
    blocks[last - 1].register_forward_hook(read)
    with pytest.raises(PlanError, match=rf"{structure.embedding}.weight is read at or behind blocks.*Use pp=1"):
        stage(state, position_ids=positions)
    stage.received.drop()
    assert not embedding.weight.any()
