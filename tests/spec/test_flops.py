"""FLOPs of a step against numbers worked out by hand, and the table of peaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.models.describe import describe_folder
from shardwise.spec.flops import matrix_parameters, peak_flops, step_flops
from shardwise.spec.model import ModelSpec, read_model
from tests.spec.model_folder import make_folder


@pytest.fixture
def tiny(tmp_path: Path) -> ModelSpec:
    """2 blocks, hidden size 8, 4 heads of 2 with 2 KV heads, FFN width 16, vocabulary 10."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    return read_model(make_folder(tmp_path, **sizes, intermediate_size=16, vocab_size=10))


# One block: q 8x8, k and v 8x4, o 8x8, gate, up and down 8x16. The head: 10x8.
BLOCK = 64 + 32 + 32 + 64 + 3 * 128
N = 2 * BLOCK + 80


def test_matrices_are_projections_and_the_head(tiny: ModelSpec) -> None:
    assert BLOCK == 576
    assert matrix_parameters(tiny) == N == 1232


def test_biases_and_norms_do_not_count(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = describe_folder(
        make_folder(tmp_path, **sizes, intermediate_size=16, vocab_size=10, model_type="qwen2", architectures=None)
    )
    assert model.block_parameters == BLOCK + 2 * 8 + 8 + 2 * 4  # norms, and the biases of q, k and v
    assert matrix_parameters(model) == N


def test_a_token_is_multiplied_by_the_experts_that_it_is_routed_to(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "model_type": "mixtral", "architectures": None}
    model = read_model(make_folder(tmp_path, **sizes, intermediate_size=16, vocab_size=10, **experts))
    assert matrix_parameters(model) == 2 * (64 + 32 + 32 + 64 + 2 * 3 * 128 + 6 * 8) + 80


def test_a_step_of_two_rows(tiny: ModelSpec) -> None:
    # 6 N a token; attention 12 L h s a token: 12 x 2 x 8 = 192 times the row's length.
    assert step_flops(tiny, [3, 5]) == 6 * 1232 * 8 + 192 * (9 + 25) == 59136 + 6528


def test_frozen_matrices_cost_four_and_adapters_six(tiny: ModelSpec) -> None:
    assert step_flops(tiny, [3, 5], num_adapter_parameters=100) == (4 * 1232 + 600) * 8 + 6528


def test_llama_2_7b_by_the_published_sizes(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32}
    model = read_model(make_folder(tmp_path, **sizes, intermediate_size=11008, vocab_size=32000))
    n = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    assert n == 6_607_077_376
    assert step_flops(model, [4096]) == 4096 * (6 * n + 12 * 32 * 4096 * 4096)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H20", "bf16", 148),
        ("NVIDIA H800", "bf16", 989),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6),
        ("Ascend910B2", "bf16", 376),
        ("Ascend910B2", "fp32", None),
        ("NVIDIA H100 80GB HBM2e", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("something new", "bf16", None),
        (None, "fp32", None),
    ],
)
def test_peaks_are_of_exactly_the_named_devices(name: str | None, precision: str, tflops: float | None) -> None:
    peak = peak_flops(name, precision)
    assert peak is None if tflops is None else peak == pytest.approx(tflops * 1e12)
