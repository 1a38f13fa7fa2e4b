"""Rows of a table of runs, as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.planner.accuracy import is_scored, predict, read_rows
from shardwise.planner.known import known_costs
from shardwise.planner.runs import SkippedRow, read_run

ROW = {
    "id": "a",
    "chip": "A100-SXM-80GB",
    "num_devices": "16",
    "n_layers": "32",
    "hidden": "4096",
    "n_heads": "32",
    "seq_len": "2048",
    "global_batch_seqs": "64",
    "micro_batch": "2",
    "tp": "4",
    "pp": "2",
    "dp": "2",
}


def test_a_row_of_shape_and_configuration_is_enough() -> None:
    run = read_run(ROW)
    assert (run.layout.num_micro_batches, run.layout.stages, run.seconds) == (16, (16, 16), None)
    assert run.cluster.chip.name == "a100-80gb"


def test_our_run_of_a_known_model_has_its_traced_costs_where_the_sizes_are_its_own() -> None:
    own = {"framework": "shardwise", "model_name": "llama2-7b", "ffn": "11008", "vocab": "32000"}
    _, known = known_costs("llama2-7b")
    assert read_run(ROW | own).costs == known.under(None)
    assert read_run(ROW | own | {"model_name": "mine"}).costs != known.under(None)
    assert read_run(ROW | own | {"n_layers": "4"}).costs.num_blocks == 4
    with pytest.raises(SkippedRow, match="tp = 3 does not divide the 32 attention heads"):
        read_run(ROW | own | {"tp": "3", "dp": "", "num_devices": "6", "pp": "2"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": ""}, "hidden is empty"),
        ({"hidden": "wide"}, "hidden = 'wide' is no number"),
        ({"chip": "abacus"}, "no profile for the chip 'abacus'"),
        ({"micro_batch": "3"}, "64 rows are no multiple of dp x micro_batch = 6"),
        ({"dp": "", "num_devices": "4"}, "4 devices are fewer than tp x pp x cp = 8"),
        ({"pp": "64"}, "32 blocks are fewer than 64 stages"),
        ({"tp": "64"}, "tp = 64 does not divide the 32 attention heads"),
        ({"dp": "4"}, "num_devices = 16 is not tp x pp x cp x dp = 32"),
        ({"dp": "", "num_devices": "20"}, "num_devices = 20 is not tp x pp x cp x dp = 16"),
        ({"tp": "0"}, "tp = 0 must be above 0"),
        ({"hidden": "nan"}, "hidden = 'nan' is no number"),
        ({"precision": "fp8"}, "a100-80gb has"),
    ],
)
def test_what_a_row_lacks_is_said(change: dict[str, str], reason: str) -> None:
    with pytest.raises(SkippedRow, match=reason):
        read_run(ROW | change)
    (made,) = predict([ROW | change])
    assert reason in made.skipped
    assert made.time_error is None


@pytest.mark.parametrize(
    ("text", "level", "recomputed"),
    [
        ("none", "none", ()),
        ("full (every layer)", "full", ()),
        ("full/block/4", "full", (4, 4)),
        ("layers=[6, 3];mp_comm_recompute", "full", (6, 3)),
        ("selective op AC", "selective", ()),
    ],
)
def test_words_for_recomputation(text: str, level: str, recomputed: tuple[int, ...]) -> None:
    chosen = read_run(ROW | {"recompute": text}).layout
    assert (chosen.recompute, chosen.recomputed) == (level, recomputed)


@pytest.mark.parametrize(
    ("text", "zero", "shard"),
    [
        ("none", 0, 2),
        ("ZeRO-1 (distributed optimizer)", 1, 2),
        ("FSDP FULL_SHARD mp=PURE", 3, 2),
        ("FSDP SHARD_GRAD_OP", 2, 2),
        ("FSDP2 (ZeRO-3 style) shard 2", 3, 2),
    ],
)
def test_words_for_what_is_shared_out(text: str, zero: int, shard: int) -> None:
    chosen = read_run(ROW | {"zero_stage_or_fsdp": text}).layout
    assert (chosen.zero, chosen.shard) == (zero, shard)


def test_words_for_a_network() -> None:
    def bandwidth(text: str) -> float:
        return read_run(ROW | {"inter_node_link": text}).cluster.links[-1].bandwidth

    assert bandwidth("8x HDR IB 200Gb/s") == 25e9
    assert bandwidth("4x Omni-Path 100Gb/s per node") == 6.25e9
    assert bandwidth("800 Gb/s per node") == 12.5e9
    assert bandwidth("RDMA 400Gb/s per GPU") == 50e9
    assert bandwidth("not stated") == 25e9


def test_a_listed_split_of_the_blocks() -> None:
    assert read_run(ROW | {"other_opts": "num-layer-list=15,17"}).layout.stages == (15, 17)
    assert read_run(ROW | {"other_opts": "pp offset=[-1 1]"}).layout.stages == (15, 17)
    empty = read_run(ROW | {"other_opts": "noop-layers=0,31"})
    assert (empty.layout.stages, empty.costs.num_blocks) == ((15, 15), 30)


def test_what_counts_as_a_full_configuration() -> None:
    assert is_scored(ROW | {"recompute": "none"})
    assert not is_scored(ROW | {"recompute": "not stated"})
    assert not is_scored(ROW | {"recompute": "none", "precision": "MXFP8"})
    assert not is_scored(ROW | {"recompute": "none", "quality": "C"})


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "has no rows"), ("id,chip\na,b\n", "has no column n_layers, hidden"), (None, "no such file")],
)
def test_a_file_that_is_no_table(tmp_path: Path, text: str | None, rule: str) -> None:
    file = tmp_path / "runs.csv"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rule):
        read_rows(file)


def test_words_for_a_precision() -> None:
    def chosen(**change: str) -> tuple[str, float, float]:
        work = read_run(ROW | change).work
        return work.precision, work.compute_bytes, work.sent_gradient_bytes

    assert chosen(precision="amp_bf16") == ("bf16", 2, 4)
    assert chosen(precision="fp16 (not stated)", framework="Megatron-DeepSpeed") == ("fp16", 2, 2)
    assert chosen(precision="fp32") == ("fp32", 4, 4)
    assert chosen(precision="fp32", framework="Megatron-LM") == ("tf32", 4, 4)
    assert chosen(chip="Ascend 910") == ("fp16", 2, 4)


def test_a_chip_with_less_memory() -> None:
    assert read_run(ROW | {"chip": "A100", "mem_gb_per_device": "40"}).cluster.chip.name == "a100-40gb"
