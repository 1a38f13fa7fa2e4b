"""Sums over replicas: how gradients are put into buckets, when those start, and that the sums are right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.models.shard import Master, Shard
from shardwise.parallel.buckets import BUCKET_BYTES, ReplicaSums, partition
from shardwise.parallel.fsdp import group_blocks
from shardwise.spec import tolerance
from shardwise.spec.layout import ParamLayout
from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import Case, assemble, compare, reference, run_cases, strategy

SIZES = st.lists(st.integers(1, 4 * BUCKET_BYTES // 3), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 50))
def test_a_number_of_buckets_is_kept_and_none_is_much_too_large(sizes: list[int], number: int) -> None:
    parts = partition(sizes, number)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    assert len(parts) == min(number, len(sizes))
    assert max(sum(sizes[i] for i in part) for part in parts) <= sum(sizes) / len(parts) + max(sizes)


@given(SIZES)
def test_buckets_by_bytes_hold_what_fits(sizes: list[int]) -> None:
    parts = partition(sizes, None)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    assert all(len(part) == 1 or sum(sizes[i] for i in part) <= BUCKET_BYTES for part in parts)
    for part, following in pairwise(parts):
        assert sum(sizes[i] for i in [*part, following[0]]) > BUCKET_BYTES


def test_nothing_to_sum_makes_no_bucket() -> None:
    assert partition([], 3) == partition([], None) == []


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_blocks_are_grouped_evenly(num_blocks: int, number: int | None) -> None:
    blocks = [nn.Identity() for _ in range(num_blocks)]
    groups = group_blocks(blocks, number)
    assert [block for group in groups for block in group] == blocks
    assert len(groups) == min(number or num_blocks, num_blocks)
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1


def _sums(rank: int, masters: bool) -> tuple[list[int], list[list[float]], int]:
    """Two micro-batches over three parameters in two buckets; rank 1 never reaches the middle one."""
    dtype = torch.bfloat16 if masters else torch.float32
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(3)]
    shards = [
        Shard(ParamLayout(str(i), (2,)), parameter, Master(parameter) if masters else None)
        for i, parameter in enumerate(parameters)
    ]
    sums = ReplicaSums(shards, torch.distributed.group.WORLD, 2)
    started = []
    for factor in (1.0, 2.0):
        if factor == 1.0:
            sums.begin(2)
        used = [0, 2] if rank else [0, 1, 2]
        sum(parameters[i].sum() * factor * (i + 1 + rank) for i in used).backward()  # type: ignore[union-attr]
        started.append(sums._started)
    sums.finish()
    return started, [shard.ensure_grad().tolist() for shard in shards], len(sums.buckets)


@pytest.mark.parametrize("masters", [False, True])
def test_a_gradient_that_one_rank_lacks_delays_its_bucket_and_no_more(masters: bool) -> None:
    """No dead-lock, and the order of the buckets is the same on both ranks."""
    results = run_distributed(_sums, 2, masters, timeout=60)
    for rank, (started, gradients, num_buckets) in enumerate(results):
        assert num_buckets == 2
        assert started == [0, 0 if rank else 2]  # all start in the last backward pass where none is lacking
        assert gradients == [[9.0, 9.0], [6.0, 6.0], [21.0, 21.0]]


LAYOUTS: dict[str, dict[str, Any]] = {
    "2": {"dp_replicate": 2},
    "2-one-bucket": {"dp_replicate": 2, "gradient_aggregation_group": 1},
    "2-a-bucket-a-tensor": {"dp_replicate": 2, "gradient_aggregation_group": 1000},
    "4": {"dp_replicate": 4, "micro_batch_size": 1, "gradient_aggregation_group": 3},
    "pp2": {"pp": 2, "dp_replicate": 2, "gradient_aggregation_group": 3},
    "tp2": {"tp": 2, "dp_replicate": 2, "gradient_aggregation_group": 3},
    "tp2-pp2": {"tp": 2, "pp": 2, "dp_replicate": 2, "gradient_aggregation_group": 3},
    "recompute": {"dp_replicate": 2, "gradient_aggregation_group": 3, "recompute": -1},
    "dp_shard2": {"dp_shard": 2, "gradient_aggregation_group": 2},
    "dp_shard2-one-unit": {"dp_shard": 2, "gradient_aggregation_group": 1, "recompute": -1},
    "pp2-dp_shard2": {"pp": 2, "dp_shard": 2, "gradient_aggregation_group": 1},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2, "gradient_aggregation_group": 3},
}
MODELS = ("llama", "qwen3-tied")
_LONG, _SHORT = make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)), make_rows((7,))
ROWS = {
    "short-last-batch": tuple(_LONG),
    "fewer-rows-than-ranks": tuple(_SHORT),
    # The second half of each batch of four has nothing supervised: some ranks see only masked rows.
    "masked-on-one-rank": tuple(
        row | {"labels": [-100] * len(row["input_ids"])} if index % 4 > 1 else row
        for index, row in enumerate(_LONG[:8])
    ),
}


# With a tie on four ranks, where its two ends are on different ones.
FEW = [("llama", 2), ("llama", 4), ("llama", 8), ("qwen3-tied", 4)]


def _is_kept(model: str, layout: str, rows: str) -> bool:
    """With a tie one kind of rows is enough, and on eight ranks that of which some ranks see nothing."""
    few = {"tp2-pp2": "masked-on-one-rank"} if model == "llama" else dict.fromkeys(LAYOUTS, "short-last-batch")
    return EVERYTHING or few.get(layout, rows) == rows


@pytest.mark.slow
@pytest.mark.parametrize(("model", "world_size"), list(product(MODELS, (2, 4, 8))) if EVERYTHING else FEW)
def test_equals_one_process(tmp_path: Path, model: str, world_size: int, note_error: Any) -> None:
    """In float64: a gradient that is summed twice, too early or not at all shows at once."""
    folder = make_model(tmp_path, model)
    cases = {
        f"{layout}/{rows}": Case(folder, strategy(**degrees), ROWS[rows], 4, 4, dtype=torch.float64)
        for layout, degrees in LAYOUTS.items()
        for rows in ROWS
        if _is_kept(model, layout, rows)
    }
    cases = {name: case for name, case in cases.items() if case.strategy.world_size == world_size}
    by_rank = run_distributed(run_cases, world_size, list(cases.values()), timeout=280)
    some = next(iter(cases.values()))
    references = {rows: reference(replace(some, rows=ROWS[rows])) for rows in {n.partition("/")[2] for n in cases}}
    for index, (name, _) in enumerate(cases.items()):
        errors = compare(assemble([rank[index] for rank in by_rank]), references[name.partition("/")[2]])
        note_error("float64 replicas", errors.gradient)
        assert errors.loss <= tolerance.FLOAT64_LOSS, name
        assert max(errors.norm, errors.gradient, errors.weight) <= tolerance.FLOAT64_GRADIENT, name
