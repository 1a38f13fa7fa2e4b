"""Which models keep packed rows apart is tried on a small copy, and where they do not, the module is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from shardwise.errors import ConfigError
from shardwise.models import packing
from shardwise.models.build import build_on_meta
from shardwise.models.packing import _check_rotary, check_packing
from tests.long import EVERYTHING
from tests.parallel.families import FAMILIES, family_config

STATE: dict[str, Any] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32},
    # Its queries are scaled by their place in what is computed, in blocks without rotary positions.
    "llama4_text": {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": 48,
        "intermediate_size_mlp": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "floor_scale": 8192,
        "pad_token_id": 0,
    },
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}
CAPACITY = 64
MIXED = {"bloom": "attention", "mamba2": "mixer"}
APART = [name for name in FAMILIES if name not in MIXED] if EVERYTHING else ["gemma2", "gpt2"]


def on_meta(folder: Path, config: Any, attention: str | None = None) -> Any:
    config.save_pretrained(folder)
    return build_on_meta(folder, attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", APART)
def test_models_with_the_common_masks_keep_rows_apart(tmp_path: Path, name: str, attention: str) -> None:
    try:
        model = on_meta(tmp_path, family_config(name), attention)
    except ConfigError:
        pytest.skip(f"{name} has no {attention}")
    check_packing(model, CAPACITY)


@pytest.mark.parametrize("name", MIXED)
def test_models_that_mix_rows_are_refused_with_the_module(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_packing(on_meta(tmp_path, family_config(name)), CAPACITY)
    message = str(error.value)
    for words in ("data.packing = true", "mixes rows", MIXED[name], "data.packing=false"):
        assert words in message


@pytest.mark.parametrize("name", STATE)
def test_convolutions_linear_attention_and_scaled_places_are_refused(tmp_path: Path, name: str) -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model(name, vocab_size=131, **STATE[name])
    with pytest.raises(ConfigError, match="mixes rows that lie one behind the other"):
        check_packing(on_meta(tmp_path, config), CAPACITY)


def _rotary(**given: Any) -> Any:
    return AutoConfig.for_model(
        "phi3",
        vocab_size=131,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        eos_token_id=1,
        bos_token_id=1,
        pad_token_id=0,
        rope_parameters={"rope_theta": 10000.0, **given},
    )


def test_rotary_factors_that_change_below_the_capacity_are_refused(tmp_path: Path) -> None:
    """Places that packed rows fill are longer than the rows, and the factors are those of the longest."""
    config = _rotary(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    model = on_meta(tmp_path, config)
    check_packing(model, 32)
    with pytest.raises(ConfigError, match=r"rope_type=longrope.*32 positions.*reach 33.*Use data.max_length=32"):
        check_packing(model, 33)
    per_kind = {"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "dynamic", "factor": 2.0}}
    with pytest.raises(ConfigError, match=r"rope_type=dynamic.*above 64 positions"):
        _check_rotary(SimpleNamespace(rope_parameters=per_kind, max_position_embeddings=64), "Model", 65)
    _check_rotary(SimpleNamespace(rope_parameters={"rope_type": "yarn"}, max_position_embeddings=8), "Model", 9)


@pytest.mark.parametrize("error", [ImportError, AssertionError, NotImplementedError])
def test_a_model_that_cannot_be_tried_is_refused_whatever_it_raises(error: type[Exception]) -> None:
    model: Any = type("Foreign", (), {"config": _rotary(rope_type="default")})()
    with (
        mock.patch.object(packing, "build_small", side_effect=error("no such kernel")),
        pytest.raises(ConfigError, match=rf"cannot be tried \({error.__name__}: no such kernel\)"),
    ):
        check_packing(model, CAPACITY)
