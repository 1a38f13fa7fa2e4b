"""The index of a checkpoint is a pickle: it may name what DCP writes there, and nothing that runs."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.checkpoint.reader import IndexReader, unlisted_damage
from shardwise.checkpoint.store import SlicedTensor, load_checkpoint, tensor_state
from shardwise.errors import CheckpointError
from shardwise.spec.layout import ParamLayout


def _tensors(values: torch.Tensor) -> dict[str, SlicedTensor]:
    return tensor_state([(ParamLayout("a", tuple(values.shape)), values)], "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_was_saved_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    values, read = torch.arange(12.0).view(4, 3).to(dtype), torch.zeros(4, 3, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(_tensors(values)), checkpoint_id=tmp_path, no_dist=True)
    load_checkpoint(tmp_path, _tensors(read), alone=True)
    assert torch.equal(read, values)


def test_a_checkpoint_without_its_list_is_held_against_its_index(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(_tensors(torch.arange(64.0))), checkpoint_id=tmp_path, no_dist=True)
    (data,) = tmp_path.glob("*.distcp")
    assert unlisted_damage(tmp_path) == ""
    size = data.stat().st_size
    os.truncate(data, size - 1)
    assert unlisted_damage(tmp_path) == f"its {data.name} has {size - 1} bytes of {size}"
    data.unlink()
    assert unlisted_damage(tmp_path) == f"it has no {data.name}"
    (tmp_path / ".metadata").write_bytes(b"")
    assert unlisted_damage(tmp_path) == "its .metadata is damaged (EOFError)"


class _Runs:
    def __init__(self, function: Any, argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, torch.load])
def test_an_index_that_would_run_code_is_refused(tmp_path: Path, function: Any) -> None:
    made = tmp_path / "made"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Runs(function, str(made))))
    with pytest.raises(CheckpointError, match="which belongs in no checkpoint"):
        IndexReader(tmp_path).read_metadata()
    assert not made.exists()


def test_an_index_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match="it names dict"):
        load_checkpoint(tmp_path, {}, alone=True)
