"""What the parts of a small copy are in the real model: by sums, by what else has these features, by numbers."""

from __future__ import annotations

import pytest

from shardwise.errors import PlanError
from shardwise.tensor.parts import Part, Parts
from shardwise.tensor.real_parts import RealSizes, real_parts


def _parts(*sizes: int) -> Parts:
    return tuple(Part(size) for size in sizes)


NONE: dict[str, tuple[int, int]] = {}


def test_a_whole_dim_tells_what_its_features_are_elsewhere() -> None:
    """Nemotron-H's convolution of x, B and C: in proportion it would be 96, 48 and 48, and every gradient wrong."""
    dims = {"norm.weight": (_parts(64), 128), "dt_bias": (_parts(8), 8), "conv1d": (_parts(64, 32, 32), 192)}
    dims["in_proj"] = (_parts(64, 64, 32, 32, 8), 328)
    sizes = RealSizes(products={64: frozenset({128, 64}), 32: frozenset({32, 64}), 8: frozenset({8})})
    found = real_parts(dims, NONE, sizes)
    assert found["conv1d"] == _parts(128, 32, 32)
    assert found["in_proj"] == _parts(128, 128, 32, 32, 8)


def test_what_the_row_layer_reads_tells_it_too() -> None:
    dims = {"self_attn.qkv_proj": (_parts(32, 16, 16), 160)}
    sizes = RealSizes(products={32: frozenset({64, 128}), 16: frozenset({16, 48})})
    with pytest.raises(PlanError, match="160 has more than one way to have such parts"):
        real_parts(dims, NONE, sizes)
    assert real_parts(dims, {"self_attn.o_proj": (32, 128)}, sizes)["self_attn.qkv_proj"] == _parts(128, 16, 16)


def test_one_unknown_size_follows_from_the_sum() -> None:
    """GPT-BigCode's queries of all heads beside one key and value, whose width no number of the configuration is."""
    sizes = RealSizes(products={48: frozenset({768}), 16: frozenset({24})})
    assert real_parts({"c_attn": (_parts(48, 16), 896)}, {"c_proj": (48, 768)}, sizes)["c_attn"] == _parts(768, 128)


def test_what_has_the_same_size_in_another_part_of_the_block_tells_less() -> None:
    """Qwen3-Next's keys are as wide as its experts in the copy, and four times as wide in the model."""
    dims = {"linear_attn.conv1d.weight": (_parts(32, 32, 64), 8192), "mlp.experts.down_proj": (_parts(32), 512)}
    found = real_parts(dims, {"linear_attn.out_proj": (64, 4096)}, RealSizes(products={32: frozenset({512, 1536})}))
    assert found["linear_attn.conv1d.weight"] == _parts(2048, 2048, 4096)


def test_dims_of_a_block_agree() -> None:
    sizes = RealSizes(products={3: frozenset({10, 20}), 4: frozenset({30, 20}), 5: frozenset({7})})
    assert real_parts({"a": (_parts(3, 4), 30)}, NONE, sizes)["a"] == _parts(10, 20)
    dims = {"mlp.a": (_parts(3, 4), 40), "mlp.b": (_parts(3, 5), 17)}  # a alone: 10 and 30, or 20 and 20
    assert real_parts(dims, NONE, sizes)["mlp.a"] == _parts(10, 30)


def test_equal_parts_that_are_unlike_elsewhere_are_refused() -> None:
    """Three parts of one size in the copy, and the first is known to be larger: thirds would be a guess."""
    sizes = RealSizes(products={16: frozenset({64, 16})})
    with pytest.raises(PlanError, match="96 has no such parts"):
        real_parts({"fused": (_parts(16, 16, 16), 96)}, {"out": (16, 64)}, sizes)
    assert real_parts({"fused": (_parts(16, 16, 16), 192)}, {"out": (16, 64)}, sizes)["fused"] == _parts(64, 64, 64)


def test_without_a_configuration_parts_keep_their_proportions() -> None:
    found = real_parts({"a": ((Part(8), Part(4, 2)), 24)}, NONE, RealSizes(units={2: 3}))
    assert found["a"] == (Part(16), Part(8, 3))
