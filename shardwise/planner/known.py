"""Sizes and costs of a model by its name or its folder, from ``config.json`` alone.

The one place that the planner's callers ask. Well-known names are configurations that come with the package.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwise.planner.shape import Experts, Latent, Shape, model_costs
from shardwise.spec.block import ModelCosts
from shardwise.spec.model import ModelSpec, read_model
from shardwise.spec.strategy import legal_tensor_degrees

_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "codegen", "mpt", "phi", "gpt_bigcode")
_MOST_TENSOR_RANKS = 128


def known_models() -> list[str]:
    """Names that need no folder."""
    return list(_configurations())


def costs_of(name_or_folder: str | Path, model: ModelSpec | None = None) -> tuple[ModelSpec, ModelCosts]:
    """Sizes and costs of a well-known model, or of the one in a folder with ``config.json``.

    Args:
        model: sizes of the model in a folder, where its file leaves some to the model's class.

    Raises:
        ConfigError: no or a broken ``config.json``, or a model that is no causal decoder.
    """
    config = _configurations().get(str(name_or_folder))
    if config is None or model is not None:
        path = Path(name_or_folder)
        model = model or read_model(path)
        return model, _costs(json.loads((path / "config.json").read_text(encoding="utf-8")), model, path.name)
    with tempfile.TemporaryDirectory() as folder:
        whole = {"num_key_value_heads": None, **config}  # null: as many as heads
        (Path(folder) / "config.json").write_text(json.dumps(whole), encoding="utf-8")
        # There is no file of it: a plan is for every model of these sizes.
        model = replace(read_model(folder), has_weights=False, hash="")
    return model, _costs(config, model, str(name_or_folder))


@cache
def _configurations() -> dict[str, dict[str, Any]]:
    text = files("shardwise").joinpath("presets", "configurations.json").read_text(encoding="utf-8")
    configurations: dict[str, dict[str, Any]] = json.loads(text)
    return configurations


def _costs(config: Mapping[str, Any], model: ModelSpec, name: str) -> ModelCosts:
    degrees = [tp for tp in legal_tensor_degrees(model) if tp <= _MOST_TENSOR_RANKS]
    return model_costs(_shape(config, model, name), degrees)


def _shape(config: Mapping[str, Any], model: ModelSpec, name: str) -> Shape:
    experts = _experts(config, model) if model.num_experts else None
    latent = None
    if config.get("kv_lora_rank"):
        latent = Latent(config.get("q_lora_rank") or 0, config["kv_lora_rank"], config.get("qk_rope_head_dim") or 64)
    gated = model.model_type not in _UNGATED
    return Shape(
        name=name,
        num_blocks=model.num_blocks,
        hidden=model.hidden_size,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=config.get("v_head_dim") or model.head_dim if latent else model.head_dim,
        ffn=model.intermediate_size,
        vocab=model.vocab_size,
        gated=gated,
        tied=model.tied,
        experts=experts,
        num_dense=config.get("first_k_dense_replace") or 0,
        latent=latent,
        window=config.get("sliding_window") or 0 if config.get("use_sliding_window", True) else 0,
        positions=0 if gated else model.max_position_embeddings,
    )


def _experts(config: Mapping[str, Any], model: ModelSpec) -> Experts:
    inner = config.get("moe_intermediate_size") or model.intermediate_size
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * inner
    chosen = config.get("num_experts_per_tok") or config.get("moe_top_k") or 2
    return Experts(number=model.num_experts, chosen=chosen, ffn=inner, shared_ffn=shared)
