"""What a model costs is what it really does: counted by hand, kept by autograd on the CPU, sent by simulated ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.check.amounts import Fit, make_amount, make_fit
from shardwise.check.costing import MOST_TABLES, model_costs
from shardwise.models.build import build_on_meta
from shardwise.models.calling import call_model
from shardwise.parallel.tensor import proven_table
from shardwise.spec.block import Amount, ModelCosts, PartCosts
from shardwise.tensor.cache import TableCache
from tests.check.test_check import make_config
from tests.check.test_description import MIXED, SMALL

LENGTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_config(tmp_path_factory.mktemp("llama") / "m", "llama", **SMALL)


@pytest.fixture(scope="module")
def llama(folder: Path) -> ModelCosts:
    return model_costs(folder, TableCache(folder / "tables"), (1, 2, 3, 4))


@pytest.mark.slow
def test_products_and_attention_are_those_of_the_configuration(llama: ModelCosts) -> None:
    (block,) = llama.kinds
    assert llama.order == (0, 0, 0)
    shapes = {product.name: (product.inner, product.outer, product.split) for product in block.products}
    assert shapes == {
        "self_attn.q_proj": (64, 64, "outer"),
        "self_attn.k_proj": (64, 32, "outer"),
        "self_attn.v_proj": (64, 32, "outer"),
        "self_attn.o_proj": (64, 64, "inner"),
        "mlp.gate_proj": (64, 96, "outer"),
        "mlp.up_proj": (64, 96, "outer"),
        "mlp.down_proj": (96, 64, "inner"),
    }
    assert block.attention is not None
    assert (block.attention.heads, block.attention.kv_heads) == (4, 2)
    assert (block.attention.qk_dim, block.attention.v_dim, block.attention.kernel) == (16, 16, "fused")
    assert [(p.name, p.inner, p.outer) for p in llama.head.products] == [("lm_head", 64, 128)]


@pytest.mark.slow
def test_eager_attention_keeps_scores_that_grow_with_the_row(folder: Path, llama: ModelCosts) -> None:
    (fused,), (eager,) = llama.kinds, model_costs(folder, TableCache(None), (1,), attention="eager").kinds
    assert eager.attention is not None
    assert eager.attention.kernel == "eager"
    # Of each head and key the result of softmax, in fp32 and once more in the precision of the products.
    kept = eager.saved["none"]
    assert kept.split_growing + kept.split_growing_bytes / 4 >= 4
    assert fused.saved["none"].split_growing == fused.saved["none"].split_growing_bytes == 0


@pytest.mark.slow
def test_parameters_and_legal_degrees_are_those_of_the_table(folder: Path, llama: ModelCosts) -> None:
    model = build_on_meta(folder, None)
    assert llama.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    (block,) = llama.kinds
    assert block.parameters.whole == 2 * 64
    assert llama.legal_degrees() == [1, 2, 4]
    assert "4 attention heads" in block.degree(3).rule
    # Four ranks for two KV heads: two of them hold the same one, which is cut all the same.
    assert block.degree(4).whole is None


@pytest.mark.slow
def test_collectives_are_those_that_the_table_counts(folder: Path, llama: ModelCosts) -> None:
    for degree in (2, 4):
        cost = proven_table(build_on_meta(folder, None), degree, TableCache(folder / "tables")).cost
        assert cost is not None
        (block,) = llama.kinds
        ring = 2 * (degree - 1) / degree
        sent = block.degree(degree).collectives
        assert {one.op for one in sent} == {"all_reduce"}
        assert 3 * ring * sum(one.elements * one.forward for one in sent) == cost.forward
        assert 3 * ring * sum(one.elements * one.backward for one in sent) == cost.backward
        assert [(one.elements, one.forward) for one in llama.embedding.degree(degree).collectives] == [(64, 1)]
        assert [(one.elements, one.backward) for one in llama.head.degree(degree).collectives] == [(64, 1)]
        sequence = {one.op: (one.forward, one.backward) for one in block.degree(degree).sequence or ()}
        assert sequence == {"all_gather": (2, 2), "reduce_scatter": (2, 2)}


@pytest.mark.slow
def test_attention_that_stays_whole_is_computed_on_every_rank(folder: Path, llama: ModelCosts) -> None:
    costs = model_costs(folder, TableCache(folder / "tables"), (1, 2), whole=0.41)
    (block,), (first,) = costs.kinds, llama.kinds
    assert block.attention is not None
    assert first.attention is not None
    assert (block.attention.split, first.attention.split) == (False, True)
    assert {p.name for p in block.products if p.split == "none"} == {f"self_attn.{n}_proj" for n in "qkvo"}
    assert block.parameters.whole == first.parameters.whole + 2 * 64 * 64 + 2 * 64 * 32
    assert block.parameters.total == first.parameters.total
    sent, every = (sum(c.forward + c.backward for c in one.degree(2).collectives) for one in (block, first))
    assert 2 * sent == every
    # The planner is told the same of the tables that it may choose; without sequence parallelism.
    assert 0 < len(llama.tables) <= MOST_TABLES
    (own,) = llama.under(max(one.whole for one in llama.tables if one.whole <= 0.41)).kinds
    assert replace(own, degrees=()) == replace(block, degrees=())
    assert own.degree(2) == replace(block.degree(2), sequence=None)
    assert own.degree(3).rule == first.degree(3).rule != ""


def _bytes(amount: Amount, size: int, length: int) -> float:
    elements = amount.split + amount.whole + amount.expert + amount.split_growing * length
    fixed = amount.split_bytes + amount.whole_bytes + amount.expert_bytes + amount.split_growing_bytes * length
    return elements * size + fixed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_autograd_keeps(folder: Path, llama: ModelCosts, dtype: torch.dtype) -> None:
    """Of the second block of a real pass on the CPU, everything but weights and what all blocks share."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(build_on_meta(folder, None).config, dtype=dtype).train()
    kept: dict[int, torch.Tensor] = {}
    shared = {p.untyped_storage().data_ptr() for p in model.parameters()}
    block, contexts = model.model.layers[1], []

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in kwargs["position_embeddings"]:
            shared.add(value.untyped_storage().data_ptr())
        pack = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.setdefault(t.untyped_storage().data_ptr(), t), t)[1], lambda t: t
        )
        contexts.append(pack)
        pack.__enter__()

    def after(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    block.register_forward_pre_hook(before, with_kwargs=True)
    block.register_forward_hook(after)
    ids = torch.arange(LENGTH)[None]
    logits = call_model(model, ids, ids)
    real = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in shared)
    assert logits.requires_grad
    told = _bytes(llama.kinds[0].saved["none"], dtype.itemsize, LENGTH) * LENGTH
    assert told == pytest.approx(real, rel=0.01)
    full = _bytes(llama.kinds[0].saved["full"], dtype.itemsize, LENGTH)
    assert full == 64 * dtype.itemsize
    assert full < _bytes(llama.kinds[0].saved["selective"], dtype.itemsize, LENGTH) < told / LENGTH


@pytest.mark.slow
def test_experts_are_one_product_over_the_tokens_that_they_get(tmp_path: Path) -> None:
    costs = model_costs(make_config(tmp_path / "m", "qwen3_moe", **MIXED), TableCache(None), (1, 2))
    assert costs.order == (0, 1, 1)
    dense, experts = costs.kinds
    assert dense.parameters.expert == 0
    products = {product.name: product for product in experts.products}
    up, down = products["mlp.experts.gate_up_proj"], products["mlp.experts.down_proj"]
    assert (up.inner, up.outer, up.uses, up.copies, up.split) == (64, 2 * 32, 2.0, 4, "outer")
    assert (down.inner, down.outer, down.uses, down.copies, down.split) == (32, 64, 2.0, 4, "inner")
    assert experts.parameters.expert == 4 * 3 * 64 * 32
    assert experts.dispatched == 2 * 64
    # Of two experts for each token: results as wide as an expert, which tensor ranks cut, and copies of the input.
    assert experts.saved["none"].expert >= 2 * 3 * 32
    assert experts.saved["none"].routed >= 2 * 64
    assert experts.forward_traffic.expert >= 2 * 5 * 32
    assert experts.forward_traffic.routed >= 2 * 2 * 64
    assert ModelCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kernel"), [("gpt2", "fused"), ("mamba2", "linear"), ("gpt_neo", "eager")])
def test_other_blocks(tmp_path: Path, family: str, kernel: str) -> None:
    sizes: dict[str, Any] = {
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
        "mamba2": {"num_heads": 8, "head_dim": 16, "hidden_size": 64, "num_hidden_layers": 2, "chunk_size": 64},
        "gpt_neo": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    }[family]
    folder = make_config(tmp_path / "m", family, **sizes, vocab_size=128)
    costs = model_costs(folder, TableCache(None), (1,))
    assert costs.num_parameters == sum(p.numel() for p in build_on_meta(folder, None).parameters())
    block: PartCosts = costs.kinds[0]
    assert block.attention is not None
    assert block.attention.kernel == kernel
    assert (block.saved["none"].split_growing + block.saved["none"].split_growing_bytes > 1) == (kernel == "eager")
    weights = sum(product.inner * product.outer for product in block.products)
    matrices = [p for p in build_on_meta(folder, None).get_submodule(_blocks(family))[0].parameters() if p.dim() == 2]
    assert weights == sum(p.numel() for p in matrices)


def _blocks(family: str) -> str:
    return "backbone.layers" if family == "mamba2" else "transformer.h"


def test_a_fit_finds_what_grows_and_leaves_out_what_no_token_causes() -> None:
    lengths = (256, 512, 1024)
    flat, growing = (
        make_fit({n: 1000 + 6.0 * n for n in lengths}),
        make_fit({n: 2.0 * n * n + 5.0 * n for n in lengths}),
    )
    assert (flat.token, flat.growing) == (pytest.approx(6), 0)
    assert (growing.token, growing.growing) == (pytest.approx(5), pytest.approx(2))
    # 10 bytes in bf16 and 14 in fp32, of which two ranks have 6 and 8: 2 elements and 6 bytes.
    amount = make_amount((Fit(10), Fit(6), Fit(14), Fit(8)), 2)
    assert (amount.split, amount.split_bytes) == (2, 4)
    assert (amount.whole, amount.whole_bytes) == (0, 2)
