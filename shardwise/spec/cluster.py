"""A cluster as the planner sees it: one chip, the levels of its links, and a software stack. Imports no torch.

SI units: bytes, seconds, FLOP/s, bytes/s of one device in one direction. Profiles are JSON files of the package;
what a machine measured about itself has the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from shardwise.config import nearest
from shardwise.errors import ConfigError

DeviceType = Literal["cpu", "cuda", "npu"]
_ENTRY_ONLY = ("aliases", "source")  # of an entry in a list of profiles
_ABOVE_ZERO = ("memory_bytes", "memory_bandwidth", "matmul_efficiency", "attention_efficiency", "bandwidth_efficiency")


@dataclass(frozen=True)
class Link:
    """One level of the network, from the inside out.

    Args:
        devices: neighbouring devices that it joins; 0: all of the cluster.
        bandwidth: bytes/s that a device can send through it.
        pair_bandwidth: bytes/s between two devices of it (a full mesh has a wire for each pair); 0: as ``bandwidth``.
        latency: seconds of a step of a collective.
        efficiency: share of ``bandwidth`` that large messages reach.
    """

    name: str
    devices: int
    bandwidth: float
    latency: float
    pair_bandwidth: float = 0.0
    efficiency: float = 0.8


@dataclass(frozen=True)
class Chip:
    """One device.

    Args:
        peak_flops: dense peak by precision (``fp32 bf16 fp16 fp8 fp4``); one that is missing cannot be run.
        matmul_efficiency: share of the peak that a large matrix product reaches.
        half_size: size of a side of a product at which half the speed of a large one is reached.
        attention_efficiency: share of the peak that a fused attention forward pass reaches at head size 128.
        bandwidth_efficiency: share of the memory bandwidth that elementwise operators reach.
        kernel_seconds: the least time of a kernel.
        shared: processes at work at once for each core that they have; all speeds are those with all of them at work,
            and one that waits leaves its share to the others. 1 for devices of their own.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    matmul_efficiency: float = 0.8
    half_size: float = 100.0
    attention_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.8
    kernel_seconds: float = 3e-6
    shared: float = 1.0


@dataclass(frozen=True)
class Stack:
    """A software stack on a chip, in three numbers.

    Args:
        slowdown: factor on the time of all kernels but attention.
        attention: factor on the time of attention (the age of its kernel).
        host_seconds: time in which the host starts one operator; small kernels wait for it.
    """

    name: str
    slowdown: float = 1.0
    attention: float = 1.0
    host_seconds: float = 6e-6


@dataclass(frozen=True)
class ClusterSpec:
    """Devices of one chip on levels of links.

    ``devices_per_node`` share a host. ``links`` go from the inside out; the last one reaches all devices.
    ``device_type`` is what torch calls the devices.
    """

    name: str
    chip: Chip
    stack: Stack
    devices_per_node: int
    links: tuple[Link, ...]
    device_type: DeviceType = "cuda"

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            ConfigError: the chip has no such precision.
        """
        peaks = self.chip.peak_flops
        if precision not in peaks:
            raise ConfigError(f"precision = {precision}", f"{self.chip.name} has {', '.join(peaks)}", "Use one of them")
        return peaks[precision]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterSpec:
        """The inverse of :meth:`to_json`; takes an entry of ``profiles/clusters.json`` too, which may name no stack.

        Raises:
            ConfigError: a field that is missing or unknown.
        """
        try:
            stack = data.get("stack")
            made = {
                "chip": Chip(**{"name": data["name"], **data["chip"]}),
                "stack": load_stack("shardwise", data["name"]) if stack is None else Stack(**stack),
                "links": tuple(Link(**link) for link in data["links"]),
            }
            fields_of_profile = {name: value for name, value in data.items() if name not in _ENTRY_ONLY}
            return _checked(cls(**{**fields_of_profile, **made}))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError("cluster profile", f"is damaged ({error})", "Write it again") from None


def _checked(cluster: ClusterSpec) -> ClusterSpec:
    """Refuse a profile of a file that no formula could work with."""
    chip, stack = cluster.chip, cluster.stack
    if cluster.device_type not in get_args(DeviceType):
        value = f"cluster profile: device_type = {cluster.device_type!r}"
        raise ConfigError(value, f"must be one of {', '.join(get_args(DeviceType))}", "Correct the file")
    if not isinstance(chip.shared, int | float) or not 1 <= chip.shared < float("inf"):
        raise ConfigError(f"cluster profile: chip.shared = {chip.shared!r}", "must be 1 or above", "Correct the file")
    numbers: dict[str, Any] = {f"chip.{name}": getattr(chip, name) for name in _ABOVE_ZERO}
    numbers |= {f"chip.peak_flops.{name}": value for name, value in chip.peak_flops.items()}
    numbers |= {"devices_per_node": cluster.devices_per_node, "stack.slowdown": stack.slowdown}
    for link in cluster.links:
        numbers |= {f"links.{link.name}.bandwidth": link.bandwidth, f"links.{link.name}.efficiency": link.efficiency}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"cluster profile: {name} = {value!r}", "must be a number above 0", "Correct the file")
    if not cluster.links or cluster.links[-1].devices != 0:
        rule = "the last of links must join all nodes (devices: 0)"
        raise ConfigError("cluster profile: links", rule, "Correct the file")
    return cluster


def cluster_names() -> list[str]:
    """Names of all profiles that come with the package."""
    return sorted(_clusters())


def load_cluster(name: str, stack: str = "shardwise") -> ClusterSpec:
    """The profile ``name`` (of a chip, or of a product that holds it) with a software stack.

    Raises:
        ConfigError: there is no such profile; the nearest name is given.
    """
    known = {_plain(alias): data for data in _clusters().values() for alias in (data["name"], *data["aliases"])}
    data = known.get(_plain(name))
    if data is None:
        near = nearest(_plain(name), list(known))
        remedy = f"Did you mean {near}?" if near else f"Known: {', '.join(cluster_names())}"
        raise ConfigError(f"cluster = {name!r}", "there is no such profile", remedy)
    return replace(ClusterSpec.from_json(data), stack=load_stack(stack, data["name"]))


def load_stack(name: str, chip: str) -> Stack:
    """A software stack's numbers on a chip: those of the chip where it has some, else those of any chip."""
    stacks = _read("stacks.json")["stacks"]
    if name not in stacks:
        near = nearest(name, list(stacks))
        remedy = f"Did you mean {near}?" if near else f"Known: {', '.join(stacks)}"
        raise ConfigError(f"stack = {name!r}", "there is no such software stack", remedy)
    family = chip.split("-")[0]
    by_chip = stacks[name]
    values = {**by_chip["any"], **by_chip.get(family, {}), **by_chip.get(chip, {})}
    return Stack(name=name, **{field.name: values[field.name] for field in fields(Stack) if field.name in values})


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@cache
def _clusters() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in _read("clusters.json")["clusters"]}


@cache
def _read(file: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(files("shardwise").joinpath("profiles", file).read_text(encoding="utf-8"))
    return data
