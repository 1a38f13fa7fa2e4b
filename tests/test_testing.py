"""What a test of ranks says when they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.testing import RankError, run_distributed


def _second_fails(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def _no_mesh(rank: int, folder: Path, failing_rank: int | None) -> int:
    tries = folder / f"tries-{rank}"
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if rank == failing_rank:
        raise ValueError("the cause")
    if tries.read_text() == "x":
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc] Connection closed by peer [127.0.0.1]:1")
    return rank


def test_the_rank_that_failed_first_is_named_before_those_that_lost_it() -> None:
    with pytest.raises(RankError) as caught:
        run_distributed(_second_fails, 2)
    first, *_, last = str(caught.value).splitlines()
    assert first == "rank 1 raised:"
    assert last.startswith("rank 0 raised:")
    assert "ValueError: the cause" in str(caught.value)


def test_ranks_that_could_not_connect_are_started_once_more(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="could not connect"):
        assert run_distributed(_no_mesh, 2, tmp_path, None) == [0, 1]


def test_a_failure_of_one_rank_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the cause"):
        run_distributed(_no_mesh, 2, tmp_path, 1)
    assert (tmp_path / "tries-1").read_text() == "x"
