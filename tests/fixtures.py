"""Small models and batches that the parity tests share (sizes of the published fault reports' fixtures)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from tests.spec.model_folder import SIZES

_SIZES: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key not in ("model_type", "architectures")},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

_MODELS: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-odd": (LlamaForCausalLM, LlamaConfig, {"vocab_size": 131, "num_hidden_layers": 5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_model(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Save the model ``name`` with random weights in ``folder``; norms and biases are random too, so none hides."""
    model_class, config_class, sizes = _MODELS[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**(_SIZES | sizes | changes)))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" in parameter_name or "lm_head" in parameter_name:
                parameter.mul_(5.0)
            else:
                parameter.mul_(8.0)
    model.save_pretrained(folder)
    return folder


def make_rows(
    lengths: tuple[int, ...] = (4, 6, 8, 10, 12, 14, 16, 16), vocab_size: int = 131
) -> list[dict[str, list[int]]]:
    """Rows that supervise very different numbers of tokens: odd ones all but their first length - 2."""
    generator = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(lengths):
        ids = generator.integers(0, vocab_size, length).tolist()
        labels = list(ids)
        if index % 2:
            labels[: length - 2] = [-100] * (length - 2)
        rows.append({"input_ids": ids, "labels": labels})
    return rows
