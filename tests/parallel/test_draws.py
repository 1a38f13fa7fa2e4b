"""Random numbers that a forward draws in training: refused where ranks that must agree would each draw its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from shardwise.errors import PlanError
from shardwise.models.build import causal_model
from shardwise.models.shrink import build_small
from shardwise.parallel.draws import refuse_draws, refuse_skipped_blocks

_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(model_type: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **(_SIZES | changes))
    config._attn_implementation = changes.get("attn_implementation", "sdpa")
    config._experts_implementation = "batched_mm"
    return config


@pytest.mark.parametrize(
    ("model_type", "changes", "drawn"),
    [
        ("phimoe", {"num_local_experts": 4}, "exponential"),  # its router samples the experts
        ("mixtral", {"num_local_experts": 4, "router_jitter_noise": 0.1}, "uniform"),
        ("starcoder2", {"residual_dropout": 0.1, "embedding_dropout": 0.0, "attention_dropout": 0.0}, "drops out"),
    ],
)
def test_what_tensor_ranks_would_draw_each_for_itself_is_refused(
    model_type: str, changes: dict[str, Any], drawn: str
) -> None:
    with pytest.raises(PlanError, match=drawn) as refusal:
        refuse_draws(build_small(_config(model_type, **changes)), 2)
    assert "strategy.tp = 2" in str(refusal.value)
    assert "tp=1" in str(refusal.value)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("mixtral", {"num_local_experts": 4, "attention_dropout": 0.1}),
        ("gpt_neox", {"attention_dropout": 0.1, "hidden_dropout": 0.1, "num_key_value_heads": None}),
    ],
)
def test_dropout_of_attention_and_of_modules_is_followed(
    model_type: str, changes: dict[str, Any], attention: str
) -> None:
    refuse_draws(build_small(_config(model_type, **changes, attn_implementation=attention)), 2)


def _mesh(**degrees: int) -> Any:
    return SimpleNamespace(size=lambda axis: degrees.get(axis, 1))


def test_blocks_skipped_by_chance_are_refused_where_ranks_must_skip_the_same_ones() -> None:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None}
    model = causal_model(_config("opt", layerdrop=0.2, **sizes))
    for axis in ("tp", "dp_shard", "pp"):
        with pytest.raises(PlanError, match=f"strategy.{axis} = 2.*layerdrop 0.2"):
            refuse_skipped_blocks(model, _mesh(**{axis: 2}))
    refuse_skipped_blocks(model, _mesh(dp_replicate=2))
    refuse_skipped_blocks(causal_model(_config("opt", **sizes)), _mesh(tp=2, pp=2, dp_shard=2))
