"""Which models keep packed rows apart is tried on a small copy, and where they do not, the module is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from shardwise.errors import ConfigError
from shardwise.models.build import build_on_meta
from shardwise.models.packing import check_packing
from tests.long import EVERYTHING
from tests.parallel.families import FAMILIES, family_config

STATE: dict[str, Any] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32},
    "qwen3_next": {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
}
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
    check_packing(model)


@pytest.mark.parametrize("name", MIXED)
def test_models_that_mix_rows_are_refused_with_the_module(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_packing(on_meta(tmp_path, family_config(name)))
    message = str(error.value)
    for words in ("data.packing = true", "mixes rows", MIXED[name], "data.packing=false"):
        assert words in message


@pytest.mark.parametrize("name", STATE)
def test_convolutions_and_linear_attention_are_refused(tmp_path: Path, name: str) -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model(name, vocab_size=131, **STATE[name])
    with pytest.raises(ConfigError, match="mixes rows that lie one behind the other"):
        check_packing(on_meta(tmp_path, config))
