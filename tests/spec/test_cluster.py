"""Profiles of chips, links and software stacks."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.spec.cluster import ClusterSpec, cluster_names, load_cluster

WANTED = """ascend-910a ascend-910b1 ascend-910b2 ascend-910b3 ascend-910b4 ascend-910c v100-32gb a100-40gb a100-80gb
a800-80gb h100-80gb h100-96gb-500w h800-80gb h20-96gb h200-141gb gh200 b200 gb200 b300 gb300 rtx-4090 l40s t4 cpu"""


def test_every_wanted_chip_has_a_profile() -> None:
    assert set(WANTED.split()) <= set(cluster_names())


@pytest.mark.parametrize("name", cluster_names())
def test_a_profile_is_whole(name: str) -> None:
    cluster = load_cluster(name)
    assert ClusterSpec.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    sizes = [link.devices for link in cluster.links]
    assert sizes[-1] == 0, "the last level reaches every device"
    assert sizes[:-1] == sorted(sizes[:-1])
    assert 0 < cluster.chip.matmul_efficiency < 1
    assert cluster.peak("fp32") > 0


def test_only_a_super_pod_joins_its_servers_by_its_own_network() -> None:
    pod, servers = (load_cluster(name).links[1] for name in ("atlas-900-a3-superpod", "atlas-800t-a3"))
    assert (pod.name, pod.devices) == ("HCCS", 768)
    assert (servers.name, servers.devices) == ("HCCS", 16)


def test_a_name_of_a_product_and_of_no_product() -> None:
    assert load_cluster("Atlas 800T A2").chip.name == "ascend-910b2"
    with pytest.raises(ConfigError, match="Did you mean h100"):
        load_cluster("h100-8gb")
    with pytest.raises(ConfigError, match="no such software stack"):
        load_cluster("h100", "megatronn")


def test_a_precision_that_a_chip_lacks() -> None:
    with pytest.raises(ConfigError, match="v100-32gb has fp32, fp16"):
        load_cluster("v100").peak("bf16")


def test_a_stack_adds_at_most_three_numbers() -> None:
    stacks = json.loads(files("shardwise").joinpath("profiles/stacks.json").read_text(encoding="utf-8"))["stacks"]
    numbers = {"slowdown", "attention", "host_seconds"}
    assert all(set(values) <= numbers for by_chip in stacks.values() for values in by_chip.values())
    assert all("any" in by_chip for by_chip in stacks.values())


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("chip", "memory_bytes"), "64 GB", "chip.memory_bytes = '64 GB': must be a number above 0"),
        (("links", 0, "bandwidth"), 0, "bandwidth = 0"),
        (("links", -1, "devices"), 8, "must join all nodes"),
        (("links", 0, "devices"), 0, "links go from the inside out"),
        (("links", 0, "devices"), 7.6, "whole number of 0 or above. Write 8"),
        (("links", 0, "latency"), -1e-6, "latency = -1e-06: must be 0 or above and at most 10. Write 0"),
        (("links", 0, "pair_bandwidth"), float("nan"), "pair_bandwidth = nan: must be a number 0 or above"),
        (("links", 0, "efficiency"), 80, "efficiency = 80: must be above 0 and at most 1. Write 0.8"),
        (("links", 0, "factors"), {"all_gathr": 2.0}, "all_gathr: .* Did you mean all_gather"),
        (("links", 0, "channels"), 2.5, "channels = 2.5: must be a whole number of 1 or above. Write 2"),
        (("links", 0, "ring"), "yes", "must be true or false"),
        (("chip", "half_size"), float("inf"), "half_size = inf"),
        (("chip", "attention_efficiency"), 45.0, "attention_efficiency = 45.0: .* at most 10"),
        (("chip", "peak_flops"), 1e12, "must name a peak of one of fp32"),
        (("chip", "peak_flops"), {"float32": 1e12}, "peak_flops.float32: must be one of fp32"),
        (("chip", "shared"), 0.5, "must be 1 or above"),
        (("stack", "host_seconds"), -6e-6, "host_seconds = -6e-06"),
        (("devices_per_node",), 0, "devices_per_node = 0: .* Write 1"),
        (("device_type",), "gpu", "device_type = 'gpu'"),
    ],
)
def test_a_profile_that_no_formula_can_work_with_is_refused(where: tuple[Any, ...], value: Any, words: str) -> None:
    data = json.loads(json.dumps(load_cluster("a100-80gb").to_json()))
    assert ClusterSpec.from_json(data) == load_cluster("a100-80gb")
    *path, last = where
    target = data
    for step in path:
        target = target[step]
    target[last] = value
    with pytest.raises(ConfigError, match=words):
        ClusterSpec.from_json(data)
