"""Small models of many architectures, each with random values where Hugging Face starts at 0 or 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_LLAMA: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 131,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}

# model_type and what differs from the sizes above.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"head_dim": 8, "sliding_window": 8}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None, "rotary_pct": 0.5}),
    "gpt_neox-serial": (
        "gpt_neox",
        {"num_key_value_heads": None, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "gpt2": ("gpt2", {}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("gemma3_text", _GEMMA),
    "phi": ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 24}),
    # The router's weight and the correction of its scores stay in fp32; the correction is a buffer that files hold.
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": None,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": False}),
    "granite": (
        "granite",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    ),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {"sliding_window": 8}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "opt": (
        "opt",
        {
            "num_key_value_heads": None,
            "intermediate_size": None,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "dropout": 0.0,
        },
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "exaone4": ("exaone4", {"sliding_window": 8}),
    "smollm3": ("smollm3", {}),
    "bloom": ("bloom", {"num_key_value_heads": None, "n_layer": 4, "n_head": 4, "hidden_dropout": 0.0}),
    "falcon": ("falcon", {}),
    "codegen": ("codegen", {"rotary_dim": 4}),
    "nemotron": ("nemotron", {}),
    "persimmon": ("persimmon", {"num_key_value_heads": None}),
    # Inputs for each block, four hidden states, and later blocks that read keys and values of earlier ones.
    "gemma3n_text": (
        "gemma3n_text",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "laurel_rank": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 131,
            "hidden_size_per_layer_input": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": None,
        },
    ),
}

# Further models of single tests: the tables of all families leave them out.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4_text": (
        "llama4_text",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
    ),
    # Dropout of its attention weights is a module.
    "gpt_neo": (
        "gpt_neo",
        {
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads")),
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
            "attention_dropout": 0.2,
            "resid_dropout": 0.1,
            "embed_dropout": 0.1,
        },
    ),
    # Its residual stream stays in fp32.
    "mamba2": (
        "mamba2",
        {
            **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size")),
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": 8,
        },
    ),
}


def family_config(name: str, **changes: Any) -> Any:
    """The configuration of the small model ``name``."""
    model_type, own = (FAMILIES | FURTHER)[name]
    sizes = _GPT2 if model_type in ("gpt2", "gptj", "codegen") else _LLAMA
    merged = sizes | own | changes
    return AutoConfig.for_model(model_type, **{k: v for k, v in merged.items() if v is not None or k == "pad_token_id"})


def make_family(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """Save the small model ``name`` in ``folder``, its norms and biases random too, so that none hides."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(name, **changes))
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif parameter is embedding or parameter is model.get_output_embeddings().weight:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.16)
            assert parameter_name
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():  # what bf16 would round
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return folder
