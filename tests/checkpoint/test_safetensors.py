"""Slices of safetensors files: right values, no more memory than the slice, and clean refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwise.checkpoint.safetensors import DTYPES, TensorFolder, contiguous_runs, read_header
from shardwise.errors import CheckpointError
from shardwise.train.memory import MemoryMeter

MIB = 2**20


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, [(start, stop) for start, stop in bounds]


@given(slices())
def test_runs_are_the_elements_of_the_slice_in_order(case):
    shape, ranges = case
    starts, length = contiguous_runs(shape, ranges)
    runs = [element for start in starts.tolist() for element in range(start, start + length)]
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    assert runs == numbers[tuple(slice(*r) for r in ranges)].reshape(-1).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{shape} {dtype}": (300 * torch.randn(shape, generator=generator)).to(dtype)
        for shape in [(5,), (6, 4), (3, 4, 5)]
        for dtype in DTYPES.values()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


@given(st.data())
@settings(deadline=None)
def test_a_slice_is_read_as_stored_or_converted(folder, data):
    where, tensors = folder
    name = data.draw(st.sampled_from(sorted(tensors)))
    whole = tensors[name]
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in whole.shape]
    expected = whole[tuple(slice(*b) for b in bounds)]
    dtype = data.draw(st.sampled_from([whole.dtype, torch.float32, torch.bfloat16]))
    out = torch.full(expected.shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
    if out.dim() > 1 and data.draw(st.booleans()):
        out = out.transpose(0, -1).contiguous().transpose(0, -1)
    with TensorFolder(where) as stored:
        stored.read_into(name, [(a, b) for a, b in bounds], out)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_reading_a_slice_takes_no_further_memory(tmp_path, dtype, dim):
    rows = 4096
    save_file({"x": torch.arange(rows).float().repeat(rows, 1)}, tmp_path / "model.safetensors")  # 64 MiB
    ranges = [(0, rows), (0, rows)]
    ranges[dim] = (rows // 2, rows)
    out = torch.zeros([stop - start for start, stop in ranges], dtype=dtype)
    meter = MemoryMeter(torch.device("cpu"))
    with TensorFolder(tmp_path) as stored:
        stored.read_into("x", ranges, out)
    peak = meter.peak_bytes()
    meter.close()
    assert peak < 6 * MIB
    assert out[7, 1].item() == torch.tensor(float(ranges[1][0] + 1), dtype=dtype).item()


def _spoilt(path: Path, how: str) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if how == "cut off":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(data + b"\0")
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "no header":
        path.write_bytes(b"\xff" * len(data))
    elif how == "not JSON":
        path.write_bytes(data[:8] + b"x" * length + data[8 + length :])
    else:
        size = len(data) - 8 - length
        header["x"] |= {
            "shape": {"shape": [9]},
            "dtype": {"dtype": "F8_E4M3"},
            "before its data": {"data_offsets": [-8, size - 8]},
        }[how]
        if how == "before its data":
            header["y"] = {"dtype": "F32", "shape": [2], "data_offsets": [size - 8, size]}
        text = json.dumps(header).encode().ljust(length)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "how", ["cut off", "longer", "empty", "no header", "not JSON", "shape", "dtype", "before its data"]
)
def test_a_broken_file_is_refused_by_name(tmp_path, how):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4)}, path)
    _spoilt(path, how)
    with pytest.raises(CheckpointError) as caught:
        TensorFolder(tmp_path)
    assert path.name in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"weight_map": {"x": "gone.safetensors"}}', "gone.safetensors"),
        ('{"weight_map": {"y": "a.safetensors"}}', "lacks y"),
        ("{", "index"),
        ("{}", "index"),
    ],
)
def test_a_broken_index_is_refused(tmp_path, text, named):
    save_file({"x": torch.zeros(4)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=named):
        TensorFolder(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        TensorFolder(tmp_path)


def test_the_header_says_where_a_tensor_lies(tmp_path):
    save_file({"x": torch.tensor([1.0, 2.0])}, tmp_path / "model.safetensors")
    entry = read_header(tmp_path / "model.safetensors")["x"]
    assert (entry.shape, entry.dtype) == ((2,), torch.float32)
    data = (tmp_path / "model.safetensors").read_bytes()[entry.start :]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [1.0, 2.0]
