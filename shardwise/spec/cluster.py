"""A cluster as the planner sees it: one chip, the levels of its links, and a software stack. Imports no torch.

SI units: bytes, seconds, FLOP/s, bytes/s of one device in one direction. Profiles are JSON files of the package;
what a machine measured about itself has the same form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from math import inf, isfinite
from typing import Any, Literal, get_args

from shardwise.config import nearest
from shardwise.errors import ConfigError

DeviceType = Literal["cpu", "cuda", "npu"]
_ENTRY_ONLY = ("aliases", "source")  # of an entry in a list of profiles
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
# Numbers of a profile: whether 0 will do, and the most that makes sense. Attention is timed against the fastest
# product, both with their own shapes, and may come out above it.
_CHIP: Mapping[str, tuple[bool, float]] = {
    "memory_bytes": (False, inf),
    "memory_bandwidth": (False, inf),
    "matmul_efficiency": (False, 1.0),
    "half_size": (True, inf),
    "attention_efficiency": (False, 10.0),
    "bandwidth_efficiency": (False, 1.0),
    "kernel_seconds": (True, 1.0),
}
_STACK: Mapping[str, tuple[bool, float]] = {
    "slowdown": (False, inf),
    "attention": (False, inf),
    "host_seconds": (True, 1.0),
}
_LINK: Mapping[str, tuple[bool, float]] = {
    "bandwidth": (False, inf),
    "latency": (True, 10.0),
    "pair_bandwidth": (True, inf),
    "efficiency": (False, 1.0),
    "send_bandwidth": (True, inf),
    "send_latency": (True, 10.0),
}


@dataclass(frozen=True)
class Link:
    """One level of the network, from the inside out.

    Args:
        devices: neighbouring devices that it joins; 0: all of the cluster.
        bandwidth: bytes/s that a device can send through it.
        pair_bandwidth: bytes/s between two devices of it (a full mesh has a wire for each pair); 0: as ``bandwidth``.
        latency: seconds of a step of a collective.
        efficiency: share of ``bandwidth`` that large messages reach.
        send_bandwidth: bytes/s of a message from one device to another, where it was timed apart from collectives,
            and ``send_latency`` its seconds; 0: not timed, as collectives.
        ring: a collective takes a step for each further member (gloo); else one for each doubling of their number.
        channels: that the communication library opens in a group inside it (NCCL), each with buffers of its own.
        factors: by collective, how many times longer it takes than the formula has it (gloo sums to all where it is to
            scatter).
    """

    name: str
    devices: int
    bandwidth: float
    latency: float
    pair_bandwidth: float = 0.0
    efficiency: float = 0.8
    send_bandwidth: float = 0.0
    send_latency: float = 0.0
    ring: bool = False
    channels: int = 8
    factors: Mapping[str, float] = field(default_factory=dict)

    def send_seconds(self, num_bytes: Any) -> Any:
        """Seconds of one message between two devices of this level."""
        wire = self.send_bandwidth or self.pair_bandwidth or self.bandwidth
        latency = self.send_latency if self.send_bandwidth else self.send_latency or self.latency
        return latency + num_bytes / (wire * self.efficiency)


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
    chip = cluster.chip
    if cluster.device_type not in get_args(DeviceType):
        value = f"cluster profile: device_type = {cluster.device_type!r}"
        near = nearest(str(cluster.device_type), get_args(DeviceType))
        rule = f"must be one of {', '.join(get_args(DeviceType))}"
        raise ConfigError(value, rule, f"Did you mean {near}?" if near else "Correct the file")
    if not isinstance(chip.peak_flops, Mapping) or not chip.peak_flops:
        rule = f"must name a peak of one of {', '.join(_PRECISIONS)}"
        raise ConfigError(f"cluster profile: chip.peak_flops = {chip.peak_flops!r}", rule, "Correct the file")
    _check_named("chip.peak_flops", chip.peak_flops, _PRECISIONS, inf)
    if not _is_number(chip.shared) or chip.shared < 1:
        raise ConfigError(f"cluster profile: chip.shared = {chip.shared!r}", "must be 1 or above", "Write 1")
    _check_numbers("chip", chip, _CHIP)
    _check_numbers("stack", cluster.stack, _STACK)
    _check_whole("devices_per_node", cluster.devices_per_node, 1)
    for link in cluster.links:
        _check_numbers(f"links.{link.name}", link, _LINK)
        if link.ring not in (True, False):
            rule = "must be true or false"
            raise ConfigError(f"cluster profile: links.{link.name}.ring = {link.ring!r}", rule, "Write false")
        _check_whole(f"links.{link.name}.channels", link.channels, 1)
        _check_named(f"links.{link.name}.factors", link.factors, _COLLECTIVES, 1000.0)
    _check_levels(cluster.links)
    return cluster


def _check_named(where: str, numbers: Any, names: Sequence[str], most: float) -> None:
    """Refuse what does not give a number above 0 for each of some ``names``."""
    if not isinstance(numbers, Mapping):
        rule = f"must give a number for some of {', '.join(names)}"
        raise ConfigError(f"cluster profile: {where} = {numbers!r}", rule, "Correct the file")
    for name, value in numbers.items():
        if name not in names:
            near = nearest(str(name), names)
            remedy = f"Did you mean {near}?" if near else "Correct the file"
            raise ConfigError(f"cluster profile: {where}.{name}", f"must be one of {', '.join(names)}", remedy)
        _check_number(f"{where}.{name}", value, False, most)


def _check_numbers(where: str, holder: Any, ranges: Mapping[str, tuple[bool, float]]) -> None:
    for name, (zero, most) in ranges.items():
        _check_number(f"{where}.{name}", getattr(holder, name), zero, most)


def _check_number(name: str, value: Any, zero: bool, most: float) -> None:
    """Refuse what is no finite number above 0 (or 0, where that will do) and at most ``most``.

    Raises:
        ConfigError: with the nearest value that will do.
    """
    least = "0 or above" if zero else "above 0"
    rule = f"must be a number {least}" if most == inf else f"must be {least} and at most {most:g}"
    if not _is_number(value):
        raise ConfigError(f"cluster profile: {name} = {value!r}", rule, "Correct the file")
    if value > most:
        # A share that was written in percent.
        remedy = f"Write {value / 100:g}" if most == 1.0 and value <= 100 else f"Write {most:g}"
        raise ConfigError(f"cluster profile: {name} = {value!r}", rule, remedy)
    if value < 0 or (value == 0 and not zero):
        remedy = "Write 0" if zero else f"Write {-value:g}" if value and -value <= most else "Correct the file"
        raise ConfigError(f"cluster profile: {name} = {value!r}", rule, remedy)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        near = max(least, round(value)) if _is_number(value) else least
        rule = f"must be a whole number of {least} or above"
        raise ConfigError(f"cluster profile: {name} = {value!r}", rule, f"Write {near}")


def _check_levels(links: tuple[Link, ...]) -> None:
    """Refuse levels that do not go from the inside out up to all devices."""
    for link in links:
        _check_whole(f"links.{link.name}.devices", link.devices, 0)
    if not links or links[-1].devices != 0:
        rule = "the last of links must join all nodes (devices: 0)"
        raise ConfigError("cluster profile: links", rule, "Correct the file")
    for inner, outer in pairwise(links):
        if inner.devices == 0 or (outer.devices and outer.devices <= inner.devices):
            value = f"cluster profile: links.{outer.name}.devices = {outer.devices}"
            rule = f"links go from the inside out, and links.{inner.name} before it joins {inner.devices or 'all'}"
            raise ConfigError(value, rule, "Put them in order: the last one joins all devices (0)")


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
