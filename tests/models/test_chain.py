"""The structure and the chain of blocks of models that transformers has, and of modules that it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from shardwise.errors import PlanError
from shardwise.models import chain as chain_module
from shardwise.models.build import freeze_stored_buffers
from shardwise.models.calling import call_model
from shardwise.models.chain import Untraceable, find_chain, record_pass
from shardwise.models.kinds import number_kinds
from shardwise.models.shrink import build_small, shrink
from shardwise.models.structure import find_structure
from shardwise.spec.tolerance import FLOAT64_GRADIENT
from tests.architectures.steps import inputs, largest_error

VOCABULARY, WIDTH = 64, 16
PAST = ("skip", "added in place", "changed inside")  # what the head reads besides the last hidden state


class Block(nn.Module):
    """Attention and MLP side by side, q, k and v in one weight in an unusual order; a tuple comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.vkq = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, scale: float, x: torch.Tensor, skip: torch.Tensor | None = None) -> tuple[None, torch.Tensor]:
        if skip is not None:
            skip += x
        value, key, query = self.vkq(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        return None, x + scale * (attended + self.mlp(x))


class Custom(nn.Module):
    """A module without a configuration; ``order`` says which block runs when, ``extra`` what else happens."""

    def __init__(self, order: tuple[int, ...] = (0, 1), extra: str = "") -> None:
        super().__init__()
        self.order, self.extra = order, extra
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        if extra == "own scale":
            self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        if extra == "shared weight":
            self.blocks[1].out = self.blocks[0].out

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = start = self.embed(input_ids) + self.places(position_ids)
        if self.extra == "added in place":
            start = self.embed(input_ids)
            for step in (1, 2):
                start += self.places(position_ids // step)
            x = start * 1.0
        if self.extra == "own scale":
            x = x * self.scale
        if self.extra.startswith("changed inside"):
            start = self.embed(input_ids) if "derived" not in self.extra else x * 2.0
        for index in self.order:
            x = self.blocks[index](0.5, x, start if f"changed inside {index}" in self.extra else None)[1]
            if self.extra == "in place":
                x *= 1.5
            if self.extra == "between":
                x = x * 1.5
        if self.extra == "mask":
            x = x * (start > 0)
        return self.head(self.norm(x + start if self.extra.startswith(PAST) else x))


def custom(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Custom(**options).double()

    return build


def test_a_custom_module_is_cut_exactly() -> None:
    build = custom()
    structure = find_structure(build())
    assert (structure.blocks, structure.embedding, structure.head) == ("blocks", "embed", "head")
    assert structure.tied
    assert structure.kinds == (0, 0)
    chain = find_chain(build(), structure)
    assert (chain.before, chain.after) == (("places",), ("norm",))
    assert (chain.input_key, chain.num_outputs, chain.output_index) == (1, 2, 1)
    error, where = largest_error(build, structure, chain)
    assert error <= FLOAT64_GRADIENT, where


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"order": (0, 1, 0)}, "block 0 runs 2 times"),
        ({"order": (1, 0)}, "they run as [1, 0]"),
        ({"order": (1,)}, "they run as [1]"),
        ({"extra": "in place"}, "what block 0 returns is changed in place"),
        (
            {"extra": "changed inside 0"},
            "blocks.0 changes in place what embed returns, and later blocks or the head read",
        ),
        ({"extra": "changed inside 0, derived"}, "block 0 changes in place what it receives"),
        ({"extra": "shared weight"}, "block 1 uses blocks.0.out.bias, which is not its own"),
    ],
)
def test_what_is_no_chain_is_refused(options: dict[str, Any], rule: str) -> None:
    model = custom(**options)()
    with pytest.raises(PlanError, match="Use pp=1") as refusal:
        find_chain(model, find_structure(model))
    assert rule in refusal.value.rule


@pytest.mark.parametrize(
    "options",
    [
        {"extra": "skip"},
        {"extra": "added in place"},
        {"extra": "changed inside 1"},
        {"extra": "mask"},
        {"extra": "between"},
        {"extra": "own scale"},
        {"order": (0,)},
    ],
    ids=[
        "the head reads the embedding",
        "which is changed in place by a module that runs twice",
        "which the last block changes in place",
        "without a gradient",
        "between",
        "a weight of the model",
        "a block never runs",
    ],
)
def test_what_flows_past_a_block_is_handed_over(options: dict[str, Any]) -> None:
    build = custom(**options)
    structure = find_structure(build())
    error, where = largest_error(build, structure, find_chain(build(), structure))
    assert error <= FLOAT64_GRADIENT, where


def test_what_a_small_copy_with_numbers_shows_to_be_changed_in_place_is_so_in_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = LlamaDecoderLayer.forward

    def added(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden_states += 1.0
        return own(self, hidden_states, *args, **kwargs)

    def no_forward(*_: object) -> None:
        raise Untraceable(PlanError("pp", "asks for numbers", "pp=1"))

    monkeypatch.setattr(LlamaDecoderLayer, "forward", added)
    monkeypatch.setattr(
        chain_module, "record_pass", lambda *given: (no_forward if on_meta(given) else record_pass)(*given)
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(shrink(CONFIG_MAPPING["llama"]()))
    hidden = find_chain(model, find_structure(model)).hidden
    assert hidden[0].changed


def on_meta(given: tuple[Any, ...]) -> bool:
    return next(given[0].parameters()).is_meta


def test_a_border_is_no_wider_than_it_must_be() -> None:
    model = custom(extra="skip")()
    chain = find_chain(model, find_structure(model))
    assert [value.module for value in chain.border(1)] == ["blocks.0", "embed", "places"]
    assert not custom_chain().further


def custom_chain() -> Any:
    model = custom()()
    return find_chain(model, find_structure(model))


def test_a_module_without_blocks_is_refused() -> None:
    model = custom()()
    del model.blocks
    with pytest.raises(PlanError, match="has no list of blocks"):
        find_structure(model)


# Learned positions; a norm of the embedding and ALiBi; parallel blocks; experts with dense blocks first; linear and
# full attention; a head with a transformation; a decoder that is half of an encoder-decoder; state space;
# a head that is registered before the embedding; inputs for each block, and keys and values that later blocks read;
# indices from block to block; a router's state from block to block, and weights of the model itself; blocks that never
# run; a table of positions that all blocks read.
EXACT = (
    *("gpt2", "bloom", "gptj", "deepseek_v3", "qwen3_next", "roberta", "bart", "mamba2", "gemma2", "xlm-roberta"),
    *("gemma4_text", "hy_v4", "zaya", "mllama", "roformer"),
)


@pytest.mark.parametrize("name", EXACT)
def test_stages_equal_the_model(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    if name in ("roberta", "xlm-roberta", "roformer"):
        config.is_decoder = True
    small = shrink(config)
    if name == "gemma4_text":
        small.num_kv_shared_layers = 3
    structure = find_structure(build_small(small))
    chain = find_chain(build_small(small), structure)
    error, where = largest_error(lambda: build_small(small), structure, chain)
    assert error <= FLOAT64_GRADIENT, where


@pytest.mark.parametrize(
    ("name", "rule"),
    [("prophetnet", "depend on more than rows and length"), ("zamba", "which is not its own")],
)
def test_what_cannot_be_handed_over_is_refused(name: str, rule: str) -> None:
    model = build_small(shrink(CONFIG_MAPPING[name]()))
    with pytest.raises(PlanError, match=r"strategy\.pp above 1") as refusal:
        find_chain(model, find_structure(model))
    assert rule in refusal.value.rule


def test_what_files_hold_is_a_weight_that_does_not_train() -> None:
    small = shrink(CONFIG_MAPPING["deepseek_v3"]())
    plain, frozen = build_small(small), build_small(small)
    with torch.no_grad():
        for model in (plain, frozen):
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.linspace(0.0, 3.0, len(buffer)))
    freeze_stored_buffers(frozen)
    assert torch.equal(call_model(plain, *inputs()), call_model(frozen, *inputs()))
    assert plain.state_dict().keys() == frozen.state_dict().keys()
    added = [p for name, p in frozen.named_parameters() if name.endswith("e_score_correction_bias")]
    assert len(added) == 2
    assert not any(p.requires_grad for p in added)


def test_kinds_are_numbered_as_they_come() -> None:
    assert number_kinds(["b", "a", "b", "c"]) == (0, 1, 0, 2)
