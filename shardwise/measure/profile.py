"""A cluster's profile from what was timed, in the form of the package's own profiles. Imports no torch."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from shardwise.measure.fit import (
    Fitted,
    by_size,
    fit_attention,
    fit_collectives,
    fit_elementwise,
    fit_factor,
    fit_products,
    rate_of,
)
from shardwise.measure.samples import CollectiveSample, Samples

_RINGS = ("all_reduce", "all_gather")  # what the wire is fitted on; other collectives take so many times its seconds
_ALONE_BANDWIDTH, _ALONE_LATENCY = 1e9, 1e-4  # of links that one process never uses
_FAST, _CHANNELS, _FEW_CHANNELS = 100e9, 24, 8  # bytes/s of NVLink, over which NCCL opens more channels than over PCIe


def fits_of(samples: Samples) -> dict[str, Fitted]:
    """Every fit by the name of what was timed."""
    main = samples.products[0].precision
    products = fit_products([one for one in samples.products if one.precision == main])
    half_size, rate = products.values["half_size"], products.values["rate"]
    fits = {f"products {main}": products}
    for precision in sorted({one.precision for one in samples.products} - {main}):
        fits[f"products {precision}"] = rate_of(
            [one for one in samples.products if one.precision == precision], half_size
        )
    peak = max(products.values["fastest"], rate)
    fits["attention"] = fit_attention([one for one in samples.attention if one.kernel == "fused"], peak)
    fits["elementwise"] = fit_elementwise(samples.elementwise, samples.operator_seconds)
    steady = [one for many in _series(samples) for one in many]
    ring = _is_ring(samples)
    rings = [one for one in steady if one.op in _RINGS]
    if rings:
        fits["collectives"] = fit_collectives(rings, ring)
        fits["send"] = fit_collectives([one for one in steady if one.op == "send"], ring)
        for op in sorted({one.op for one in steady} - {*_RINGS, "send"}):
            own = [one for one in steady if one.op == op]
            fits[op] = fit_factor(own, fits["collectives"].values, ring)
    return fits


def _is_ring(samples: Samples) -> bool:
    """gloo hands pieces round; what accelerators have takes trees where they are faster."""
    return samples.device_type == "cpu"


def _series(samples: Samples) -> list[list[CollectiveSample]]:
    """The collectives by kind and group, each with times that grow with its size."""

    def kind(one: CollectiveSample) -> tuple[str, int]:
        return one.op, one.ranks

    ordered = sorted(samples.collectives, key=kind)
    return [by_size(list(many), lambda one: one.num_bytes) for _, many in groupby(ordered, key=kind)]


def profile_of(samples: Samples, name: str) -> dict[str, Any]:
    """The profile: JSON as an entry of ``profiles/clusters.json``, with the software stack that was measured too."""
    fits = fits_of(samples)
    main = samples.products[0].precision
    products, elementwise = fits[f"products {main}"].values, fits["elementwise"].values
    peak = max(products["fastest"], products["rate"])
    efficiency = products["rate"] / peak
    peaks = {main: peak}
    for label, fitted in fits.items():
        kind, _, precision = label.partition(" ")
        if kind == "products" and precision != main:
            peaks[precision] = fitted.values["rate"] / efficiency
    wire, send = (fits[key].values if key in fits else None for key in ("collectives", "send"))
    bandwidth = wire["bandwidth"] if wire else _ALONE_BANDWIDTH
    link = {
        "name": "processes" if samples.device_type == "cpu" else "devices",
        "devices": 0,
        "bandwidth": bandwidth,
        "latency": wire["latency"] if wire else _ALONE_LATENCY,
        "efficiency": 1.0,
        # Not as the wire of a pair: that would bound collectives too, which were timed themselves.
        "send_bandwidth": send["bandwidth"] if send else 0.0,
        "send_latency": send["latency"] if send else 0.0,
        "ring": _is_ring(samples),
        "channels": _CHANNELS if bandwidth >= _FAST else _FEW_CHANNELS,
        "factors": {name: fitted.values["factor"] for name, fitted in fits.items() if "factor" in fitted.values},
    }
    at_once = samples.processes * samples.threads
    return {
        "name": name,
        "aliases": [],
        "device_type": samples.device_type,
        "devices_per_node": samples.processes,
        "source": f"measured with {samples.processes} processes of {samples.threads} threads at once ({samples.level})",
        "chip": {
            "memory_bytes": samples.memory_bytes,
            "memory_bandwidth": elementwise["bandwidth"],
            "peak_flops": peaks,
            "matmul_efficiency": efficiency,
            "half_size": products["half_size"],
            "attention_efficiency": fits["attention"].values["efficiency"],
            "bandwidth_efficiency": elementwise["efficiency"],
            "kernel_seconds": samples.operator_seconds,
            "shared": max(1.0, at_once / samples.cores) if samples.device_type == "cpu" else 1.0,
        },
        "links": [link],
        "stack": {"name": "shardwise", "slowdown": 1.0, "attention": 1.0, "host_seconds": 0.0},
    }
