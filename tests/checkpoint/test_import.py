"""Hugging Face folders as they come: many files, any of three dtypes, and what is not what it says refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.naming import naming_of_folder
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models.build import build_on_meta
from shardwise.models.shard import Shard
from shardwise.spec.layout import ParamLayout
from shardwise.spec.model import check_weights, read_model
from tests.fixtures import make_model

INDEX = "model.safetensors.index.json"


def _parted(folder: Path, dtype: torch.dtype) -> Path:
    """A model in many files, as transformers saves it."""
    made = make_model(folder / "made", "llama")
    model = AutoModelForCausalLM.from_pretrained(made, dtype=dtype)
    model.save_pretrained(folder / "model", max_shard_size="10kB")
    assert len(list((folder / "model").glob("model-*.safetensors"))) > 4
    return folder / "model"


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """Every parameter, as a run on one process reads it."""
    check_weights(folder, read_model(folder))
    model = build_on_meta(folder, None)
    shards = [
        Shard(ParamLayout(name, tuple(each.shape)), torch.nn.Parameter(torch.full(each.shape, torch.nan)))
        for name, each in model.named_parameters()
    ]
    load_slices(folder, shards, naming_of_folder(folder, model))
    return {shard.layout.name: shard.data for shard in shards}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_many_files_of_any_dtype_give_the_values_that_transformers_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = _parted(tmp_path, dtype)
    want = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    got = _load(folder)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


class _Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def _index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def _truncated(folder: Path) -> None:
    path = sorted(folder.glob("model-*.safetensors"))[3]
    os.truncate(path, path.stat().st_size - 4)


def _gone(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[3].unlink()


def _moved(folder: Path) -> None:
    """The index looks for the norm in a file that does not hold it."""
    _index(folder, **{"model.norm.weight": sorted(folder.glob("model-*.safetensors"))[0].name})


def _outside(folder: Path) -> None:
    _index(folder, **{"model.norm.weight": "../made/model.safetensors"})


def _pickled_shard(folder: Path) -> None:
    (folder / "model-norm.safetensors").write_bytes(pickle.dumps(_Runs(folder / "ran")))
    _index(folder, **{"model.norm.weight": "model-norm.safetensors"})


def _pickled_beside(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Runs(folder / "ran")))


def _own_code(folder: Path) -> None:
    """A configuration that names code of its own: it is read as the family that it says it is."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "code.Model"}}))
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(folder / 'ran')!r})\n")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_truncated, "its data should end at byte"),
        (_gone, "of which 1 are absent"),
        (_moved, "it lacks model.norm.weight"),
        (_outside, "which is no file of its folder"),
        (_pickled_shard, "not a readable safetensors file"),
        (_pickled_beside, r"pickled \(pytorch_model.bin\)"),
    ],
)
def test_what_is_not_what_it_says_is_refused_and_runs_nothing(
    tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    folder = _parted(tmp_path, torch.float32)
    harm(folder)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        _load(folder)
    assert not (folder / "ran").exists()


def test_code_in_a_model_folder_does_not_run(tmp_path: Path) -> None:
    folder = _parted(tmp_path, torch.float32)
    want = _load(folder)
    _own_code(folder)
    got = _load(folder)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not (folder / "ran").exists()
