"""A model folder made of JSON alone: enough for every decision that is taken before torch is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.spec.model import ModelSpec, read_model

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 132,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def make_folder(folder: Path, *, weights: str | None = "model.safetensors", **changes: Any) -> Path:
    """Write ``config.json`` (a change to None removes the key) and an empty file for the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (SIZES | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if weights is not None:
        (folder / weights).touch()
    return folder


def make_spec(folder: Path, **changes: Any) -> ModelSpec:
    return read_model(make_folder(folder, **changes))
