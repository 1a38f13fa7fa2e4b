"""File tensors and parameters: every element of either has its place in the other, slice by slice."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.compose import Composed, boxes
from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.naming import default_naming, naming_of_folder
from shardwise.errors import CheckpointError
from shardwise.models.build import build_on_meta
from shardwise.models.shard import Shard
from shardwise.spec.layout import ParamLayout, chunk_range
from tests.layouts import grids, held
from tests.parallel.families import make_family


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_moves_of_elements_are_those_of_torch(data: st.DataObject) -> None:
    """Random chains of stack, join, cut and turn; then what random layouts hold, read box by box."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    stored = {f"t{i}": torch.arange(i * 100, i * 100 + shape[0] * shape[1]).view(shape).float() for i in range(4)}
    real = list(stored.values())
    made = [Composed.whole(name, tensor.shape) for name, tensor in stored.items()]
    dim = data.draw(st.integers(0, 1))
    pairs = [(torch.cat(real[i : i + 2], dim), torch.cat(made[i : i + 2], dim)) for i in (0, 2)]
    if data.draw(st.booleans()):
        pairs = [(torch.transpose(a, 0, 1), torch.transpose(b, 0, 1)) for a, b in pairs]
    axis = data.draw(st.integers(0, 2))
    want, got = torch.stack([a for a, _ in pairs], axis), torch.stack([b for _, b in pairs], axis)
    cut = data.draw(st.integers(0, 2))
    size = data.draw(st.integers(1, want.shape[cut]))
    index = data.draw(st.integers(0, -(-want.shape[cut] // size) - 1))
    want, got = torch.split(want, size, cut)[index], torch.split(got, size, cut)[index]
    assert tuple(got.shape) == tuple(want.shape)
    for layout in data.draw(grids(tuple(want.shape))):
        out = torch.full(layout.local_shape, -1.0)
        for box in boxes(got.parts, layout.pieces):
            box.turned(out[box.local]).copy_(stored[box.name][tuple(slice(*r) for r in box.stored)])
        assert torch.equal(out, held(want, layout))


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral", "qwen3_moe", "gpt2", "gemma2", "glm", "phi3"])
def test_names_are_those_that_transformers_saves_and_values_those_that_it_loads(tmp_path: Path, name: str) -> None:
    folder = make_family(tmp_path, name)
    model = build_on_meta(folder, None)
    naming, default = naming_of_folder(folder, model), default_naming(model, torch.float32)
    assert {n: t.shape for n, t in naming.tensors.items()} == {n: t.shape for n, t in default.tensors.items()}
    assert set(naming.tensors) == set(load_file(folder / "model.safetensors"))
    for parameter_name, want in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        for dim, rank in itertools.product(range(want.dim()), range(2)):
            layout = _two_parts(parameter_name, tuple(want.shape), dim, rank)
            shard = Shard(layout, torch.nn.Parameter(torch.full(layout.local_shape, float("nan"))))
            load_slices(folder, [shard], naming)
            assert torch.equal(shard.data, held(want.detach(), layout)), (parameter_name, dim)


def _two_parts(name: str, shape: tuple[int, ...], dim: int, rank: int) -> ParamLayout:
    """Gate and up, say, in one matrix, each cut in two; and the last shard of three of what that gives."""
    ranges = (chunk_range(shape[dim], 4, rank), chunk_range(shape[dim], 4, rank + 2))
    layout = ParamLayout(name, shape, tp_dim=dim, tp_ranges=ranges)
    return replace(layout, shard_range=chunk_range(layout.local_shape[0], 3, rank + 1))


def _rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> Path:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return folder


_EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({_EXPERT: None}, "gate_up_proj"),
        ({_EXPERT: torch.zeros(47, 32)}, "gate_up_proj"),
        ({"model.norm.weight": None}, "model.norm.weight"),
        ({"model.norm.bias": torch.zeros(32)}, "model.norm.bias"),
        ({"lm_head.weight": torch.zeros(130, 32)}, "lm_head.weight has shape"),
        ({"lm_head.weight": torch.zeros(131, 32, dtype=torch.int64)}, "lm_head.weight is torch.int64"),
        ({"model.layers.9.input_layernorm.weight": torch.zeros(32)}, "model.layers.9"),
    ],
)
def test_a_tensor_too_few_too_many_or_of_another_shape_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], words: str
) -> None:
    folder = _rewrite(make_family(tmp_path, "mixtral"), change)
    with pytest.raises(CheckpointError, match=words):
        naming_of_folder(folder, build_on_meta(folder, None))


def test_old_names_of_the_hub_masks_and_a_tied_head_stored_twice(tmp_path: Path) -> None:
    """GPT-2's files lack the prefix of the module and hold causal masks; some files hold a tied head as well."""
    folder = make_family(tmp_path, "gpt2")
    old = {n.removeprefix("transformer."): t for n, t in load_file(folder / "model.safetensors").items()}
    head = {"lm_head.weight": old["wte.weight"].clone()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.1.attn.bias": torch.ones(8, dtype=torch.bool)}
    save_file(old | head | masks, folder / "model.safetensors")
    naming = naming_of_folder(folder, build_on_meta(folder, None))
    assert set(naming.tensors) == set(old | head)
    assert {part.name for part in naming.parts["transformer.wte.weight"]} == {"wte.weight", "lm_head.weight"}


def test_files_keep_their_number_and_each_tensor_its_dtype(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gpt_neox")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, listed in files.items():
        save_file({n: tensors[n].half() if "norm" in n else tensors[n] for n in listed}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, listed in files.items() for n in listed}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    naming = naming_of_folder(folder, build_on_meta(folder, None))
    assert {n: t.file for n, t in naming.tensors.items()} == index["weight_map"]
    assert all(t.dtype is (torch.float16 if "norm" in n else torch.float32) for n, t in naming.tensors.items())
