"""The fits find the numbers of a machine again, also where some samples are disturbed; profiles follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.front.planning import find_cluster
from shardwise.measure.fit import by_size, fit_collectives, fit_products
from shardwise.measure.profile import fits_of, profile_of
from shardwise.measure.samples import CollectiveSample, Samples
from shardwise.planner.collectives import collective_seconds, send_seconds
from shardwise.planner.compute import part_passes
from shardwise.planner.layout import Layout, Work
from shardwise.spec.block import Attention, Parameters, PartCosts, Product
from shardwise.spec.cluster import ClusterSpec
from tests.measure import made_samples as made


def test_every_number_is_found_again() -> None:
    fits = fits_of(made.made_samples())
    assert fits["products fp32"].values["rate"] == pytest.approx(made.RATE, rel=0.03)
    assert fits["products fp32"].values["half_size"] == pytest.approx(made.HALF, rel=0.06)
    assert fits["products bf16"].values["rate"] == pytest.approx(2 * made.RATE, rel=0.03)
    assert fits["elementwise"].values["bandwidth"] == pytest.approx(made.BANDWIDTH)
    assert fits["collectives"].values["latency"] == pytest.approx(made.LATENCY, rel=1e-3)
    assert fits["collectives"].values["bandwidth"] == pytest.approx(made.WIRE, rel=1e-3)
    assert fits["send"].values["bandwidth"] == pytest.approx(made.SEND, rel=1e-3)
    assert fits["reduce_scatter"].values["factor"] == pytest.approx(made.SCATTER, rel=1e-3)
    assert fits["attention"].values["efficiency"] == pytest.approx(made.ATTENTION, rel=0.03)
    assert max(fitted.error for name, fitted in fits.items() if name != "elementwise") < 0.03


def test_a_sample_that_was_disturbed_moves_nothing() -> None:
    samples = made.made_samples()
    wire = [one for one in samples.collectives if one.op in ("all_reduce", "all_gather")]
    slow = [replace(one, seconds=one.seconds * (10 if number == 3 else 1)) for number, one in enumerate(wire)]
    assert fit_collectives(slow, ring=True).values["latency"] == pytest.approx(made.LATENCY, rel=0.01)
    products = [one for one in samples.products if one.precision == "fp32"]
    disturbed = [replace(one, seconds=one.seconds * (3 if one is products[2] else 1)) for one in products]
    assert fit_products(disturbed).values["rate"] == pytest.approx(made.RATE, rel=0.05)


def test_times_grow_with_the_message() -> None:
    series = [CollectiveSample("all_reduce", 2, size, seconds) for size, seconds in ((1, 3.0), (2, 2.0), (4, 5.0))]
    assert [one.seconds for one in by_size(series, lambda one: one.num_bytes)] == [2.0, 2.0, 5.0]


def test_the_formulas_of_the_planner_give_the_samples_back() -> None:
    """The forms are written twice, below the planner and in it: here they meet."""
    samples = made.made_samples()
    cluster = ClusterSpec.from_json(profile_of(samples, "made"))
    for one in samples.collectives:
        seconds = (
            send_seconds(one.num_bytes, 0, 1, cluster)
            if one.op == "send"
            else collective_seconds(one.op, one.num_bytes, one.ranks, 1, cluster)  # type: ignore[arg-type]
        )
        assert seconds == pytest.approx(one.seconds, rel=0.01), one
    for product in samples.products:
        part = PartCosts("one", Parameters(), Parameters(), (Product("p", product.inner, product.outer),))
        work = Work(product.rows, product.precision, compute_bytes=1e-9)
        assert part_passes(part, Layout(), work, cluster).forward["matmul"] == pytest.approx(product.seconds, rel=0.05)
    for one in samples.attention:
        core = Attention(one.heads, one.heads, one.head_dim, one.head_dim)
        passes = part_passes(
            PartCosts("one", Parameters(), Parameters(), attention=core),
            Layout(micro_batch=one.rows),
            Work(one.length, "fp32"),
            cluster,
        )
        both = passes.forward["attention"] + passes.backward["attention"]
        assert both == pytest.approx(one.seconds, rel=0.05)


def test_a_profile_is_read_as_any_other(tmp_path: Path) -> None:
    profile = profile_of(made.made_samples(), "mine")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile), encoding="utf-8")
    cluster = find_cluster(str(path))
    assert (cluster.device_type, cluster.devices_per_node, cluster.chip.shared) == ("cpu", 4, 2.0)
    assert cluster.chip.matmul_efficiency <= 1
    assert ClusterSpec.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_one_process_needs_no_collectives() -> None:
    cluster = ClusterSpec.from_json(profile_of(made.made_samples(processes=1), "alone"))
    assert cluster.chip.shared == 1.0
    assert Samples.from_json(json.loads(json.dumps(made.made_samples().to_json()))) == made.made_samples()
