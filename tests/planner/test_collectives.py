"""Collectives on levels of links."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.planner.collectives import collective_seconds, send_seconds
from shardwise.spec.cluster import Chip, ClusterSpec, Link, Stack, load_cluster

FAST, SLOW = Link("inside", 8, 100.0, 0.0, efficiency=1.0), Link("outside", 0, 10.0, 0.0, efficiency=1.0)
TWO_LEVELS = ClusterSpec("two", Chip("chip", 1.0, 1.0, {"fp32": 1.0}), Stack("plain"), 8, (FAST, SLOW))


@pytest.mark.parametrize(("op", "times"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_a_ring_inside_a_node(op: str, times: int) -> None:
    assert collective_seconds(op, 400.0, 4, 1, TWO_LEVELS) == pytest.approx(times * 400 * 3 / 4 / 100)


def test_one_rank_sends_nothing() -> None:
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert collective_seconds(op, 1e9, 1, 1, load_cluster("a100")) == 0


def test_a_group_uses_the_network_cards_of_its_members_in_a_node() -> None:
    alone = collective_seconds("all_gather", 800.0, 16, 8, TWO_LEVELS)  # one member a node
    together = collective_seconds("all_gather", 800.0, 16, 1, TWO_LEVELS)  # eight members a node
    assert alone == pytest.approx(800 * 15 / 16 / 10)
    assert together == pytest.approx(800 * 15 / 16 / 80)


def test_a_last_node_that_is_filled_in_part_has_fewer_cards() -> None:
    twelve = collective_seconds("all_gather", 800.0, 12, 1, TWO_LEVELS)  # eight members, and four
    assert twelve == pytest.approx(800 * 11 / 12 / 40)
    exchanged = collective_seconds("all_to_all", 800.0, 12, 1, TWO_LEVELS)
    assert exchanged == pytest.approx(800 * 8 / 12 / 10)  # of each of the four, the part for the eight


def test_a_full_mesh_gives_a_pair_one_wire() -> None:
    ascend = load_cluster("ascend-910b2")
    two, eight = (collective_seconds("all_gather", 1e9, ranks, 1, ascend) for ranks in (2, 8))
    assert two == pytest.approx(1e9 / 2 / (28e9 * 0.8), rel=1e-2)
    assert eight == pytest.approx(1e9 * 7 / 8 / (196e9 * 0.8), rel=1e-2)


def test_arrays_of_candidates_give_what_numbers_give() -> None:
    cluster, ranks, strides = load_cluster("ascend-910c"), np.array([1, 2, 8, 16, 64]), np.array([8, 1, 2, 1, 16])
    for op in ("all_reduce", "all_to_all"):
        together = collective_seconds(op, 1e8, ranks, strides, cluster)
        alone = [collective_seconds(op, 1e8, r, s, cluster) for r, s in zip(ranks, strides, strict=True)]
        np.testing.assert_allclose(together, np.array(alone, dtype=float))


def test_a_send_takes_the_innermost_link_that_joins_both() -> None:
    assert send_seconds(100.0, 0, 7, TWO_LEVELS) == pytest.approx(1.0)
    assert send_seconds(100.0, 7, 8, TWO_LEVELS) == pytest.approx(10.0)
