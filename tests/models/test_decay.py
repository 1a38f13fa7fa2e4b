"""What decays: the matrices that Hugging Face's Trainer lets decay, however a family names its norms."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.spec.decay import decays
from tests.decay import decaying
from tests.parallel.families import FAMILIES, FURTHER, family_config


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_the_matrices_that_hugging_face_lets_decay(family: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config(family))
    found = {name for name, parameter in model.named_parameters() if decays(name, parameter.shape)}
    assert found == decaying(model)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.q_norm.weight", (4, 8)),  # Cohere: a norm for each head
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 32)),  # gpt-oss: a bias for each expert
        ("model.norm.weight", (8,)),
        ("h.0.ln_1.weight", (8,)),
        ("backbone.layers.0.mixer.A_log", (8,)),
    ],
)
def test_norms_and_biases_do_not_decay_whatever_their_shape(name: str, shape: tuple[int, ...]) -> None:
    assert not decays(name, shape)


def test_matrices_decay_that_only_sound_like_norms() -> None:
    assert decays("model.layers.0.normalizer_proj.weight", (8, 8))
    assert decays("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 8))
