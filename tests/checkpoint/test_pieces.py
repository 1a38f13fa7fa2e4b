"""Parameters that a rank holds in several pieces: exported, saved, and read under any other layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import export_model
from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.listing import complete_checkpoints
from shardwise.checkpoint.naming import naming_of_folder, plain_naming
from shardwise.checkpoint.save_job import save_checkpoint
from shardwise.checkpoint.store import load_checkpoint, tensor_state
from shardwise.models.build import build_on_meta
from shardwise.models.shard import Shard, take
from shardwise.spec.layout import ParamLayout, chunk_range
from shardwise.testing import run_distributed
from shardwise.train.memory import MemoryMeter
from tests.layouts import held, random_grid
from tests.parallel.families import make_family

MIB = 2**20
# Fused rows, a fused bias, a stack of fused experts, columns, a weight that fewer rows than ranks have.
SHAPES = {"qkv": (24, 5), "bias": (24,), "gate_up": (3, 10, 4), "out": (7, 12), "conv": (9, 1, 4), "few": (2, 3)}


def _layouts(seed: int, tp: int, dp_shard: int, rank: int) -> list[ParamLayout]:
    """Each shape several times, cut at random."""
    cases = [(f"{name}.{number}", shape) for name, shape in SHAPES.items() for number in range(8)]
    return [random_grid(seed, shape, tp, dp_shard, name)[rank] for name, shape in cases]


def _value(layout: ParamLayout) -> torch.Tensor:
    """The whole parameter, different for each."""
    start = float(len(layout.name) + 1000 * int(layout.name.rpartition(".")[2]))
    return torch.arange(torch.Size(layout.shape).numel()).view(layout.shape).float() + start


def _write(rank: int, folder: Path, tp: int, dp_shard: int) -> None:
    layouts = _layouts(1, tp, dp_shard, rank)
    shards = [Shard(layout, torch.nn.Parameter(take(_value(layout), layout).contiguous())) for layout in layouts]
    shapes = {layout.name: layout.shape for layout in layouts}
    source = Companions(folder)
    export_model(source, folder / "export", plain_naming(shapes, torch.float32), shards)
    save_checkpoint(folder / "saved", 3, tensor_state([(s.layout, s.data) for s in shards], "model"), {}, source)


def _read(rank: int, folder: Path, tp: int, dp_shard: int) -> int:
    """Both again under other layouts; the number of tensors in several pieces."""
    layouts = _layouts(2, tp, dp_shard, rank)
    shapes = {layout.name: layout.shape for layout in layouts}

    def check(read: dict[str, torch.Tensor]) -> None:
        for layout in layouts:
            assert torch.equal(read[layout.name], held(_value(layout), layout)), layout

    shards = [Shard(layout, torch.nn.Parameter(torch.full(layout.local_shape, torch.nan))) for layout in layouts]
    load_slices(folder / "export", shards, plain_naming(shapes, torch.float32))
    check({shard.layout.name: shard.data for shard in shards})
    values = [(layout, torch.full(layout.local_shape, torch.nan)) for layout in layouts]
    load_checkpoint(complete_checkpoints(folder / "saved")[-1], tensor_state(values, "model"))
    check({layout.name: value for layout, value in values})
    return sum(len(layout.pieces) > 1 for layout in layouts)


# (tp, dp_shard) of the run that writes and of the one that reads
CHANGES = [((4, 1), (2, 2)), ((2, 2), (4, 1)), ((2, 2), (1, 4)), ((1, 4), (2, 2))]


def _write_and_read(rank: int, folder: Path) -> list[int]:
    counts = []
    for number, (before, after) in enumerate(CHANGES):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        _write(rank, place, *before)
        counts.append(_read(rank, place, *after))
    dist.barrier()
    return counts


def test_what_one_layout_of_several_ranges_writes_any_other_reads(tmp_path: Path) -> None:
    counts = run_distributed(_write_and_read, 4, tmp_path)
    assert [sum(held_in_pieces) > 0 for held_in_pieces in zip(*counts, strict=True)] == [True, True, False, True]
    for number in range(len(CHANGES)):
        exported = load_file(tmp_path / str(number) / "export" / "model.safetensors")
        assert len(exported) == 8 * len(SHAPES)
        for name, tensor in exported.items():
            assert torch.equal(tensor, _value(ParamLayout(name, tuple(tensor.shape)))), name


def _fused(name: str, shape: tuple[int, ...], sizes: tuple[int, ...], tp: int, rank: int) -> ParamLayout:
    """Parts of ``sizes`` rows (the last dim but one), each cut in ``tp``."""
    ranges, start = [], 0
    for size in sizes:
        low, high = chunk_range(size, tp, rank)
        ranges.append((start + low, start + high))
        start += size
    return ParamLayout(name, shape, tp_dim=len(shape) - 2, tp_ranges=tuple(ranges))


@pytest.mark.parametrize(
    ("family", "weight", "parts"),
    [
        ("phi3", "self_attn.qkv_proj.weight", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("phi3", "mlp.gate_up_proj.weight", ["mlp.gate_proj", "mlp.up_proj"]),
        ("glm", "mlp.gate_up_proj.weight", ["mlp.gate_proj", "mlp.up_proj"]),
    ],
)
def test_a_rank_loads_its_part_of_each_part_of_a_fused_weight(
    tmp_path: Path, family: str, weight: str, parts: list[str]
) -> None:
    """The local weight is that of separate layers, each cut by itself and joined on the rank."""
    folder = make_family(tmp_path, family)
    name = f"model.layers.1.{weight}"
    whole = load_file(folder / "model.safetensors")[name]
    sizes = (32, 16, 16) if "qkv" in weight else (48, 48)
    assert len(sizes) == len(parts)
    naming = naming_of_folder(folder, build_on_meta(folder, None))
    for rank in range(2):
        layout = _fused(name, tuple(whole.shape), sizes, 2, rank)
        shard = Shard(layout, torch.nn.Parameter(torch.full(layout.local_shape, torch.nan)))
        load_slices(folder, [shard], naming)
        assert torch.equal(shard.data, torch.cat([part.chunk(2)[rank] for part in whole.split(sizes)]))


def test_a_rank_loads_gate_and_up_of_experts_that_lie_one_by_one(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "mixtral")
    files = load_file(folder / "model.safetensors")
    where = "model.layers.2.block_sparse_moe.experts"
    naming = naming_of_folder(folder, build_on_meta(folder, None))
    for rank in range(2):
        layout = _fused("model.layers.2.mlp.experts.gate_up_proj", (4, 96, 32), (48, 48), 2, rank)
        shard = Shard(layout, torch.nn.Parameter(torch.full(layout.local_shape, torch.nan)))
        load_slices(folder, [shard], naming)
        for expert in range(4):
            gate, up = (files[f"{where}.{expert}.{short}.weight"].chunk(2)[rank] for short in ("w1", "w3"))
            assert torch.equal(shard.data[expert], torch.cat([gate, up]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as stored", "converted"])
@pytest.mark.parametrize("tp_dim", [0, 1, 2], ids=["rows", "fused experts", "columns"])
def test_pieces_take_no_further_memory_while_they_are_read(tmp_path: Path, dtype: torch.dtype, tp_dim: int) -> None:
    """Half of 64 MiB in two ranges, by a buffer of 1 MiB; the allocator keeps a few."""
    shape = (16, 1024, 1024)
    whole = torch.arange(2**24).float().view(shape)
    save_file({"x": whole}, tmp_path / "model.safetensors")
    size = shape[tp_dim]
    layout = ParamLayout("x", shape, tp_dim=tp_dim, tp_ranges=((size // 4, size // 2), (size - size // 4, size)))
    shard = Shard(layout, torch.nn.Parameter(torch.zeros(layout.local_shape, dtype=dtype)))
    meter = MemoryMeter(torch.device("cpu"))
    load_slices(tmp_path, [shard], plain_naming({"x": shape}, torch.float32))
    peak = meter.peak_bytes()
    meter.close()
    assert peak < 8 * MIB
    assert torch.equal(shard.data, held(whole, layout).to(dtype))
