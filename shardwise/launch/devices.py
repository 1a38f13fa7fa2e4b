"""Which devices a job runs on: the type that is asked for or found, and how many a job may use. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast, get_args

from shardwise.errors import ConfigError
from shardwise.launch.alive import VISIBLE, has_gpus, npu_numbers, num_gpus
from shardwise.spec.plan import DeviceType

OVERRIDE = "device=cpu or SHARDWISE_DEVICE=cpu runs on the CPU"


def choose_device(wanted: str) -> DeviceType:
    """The device type to run on, by what the system shows; ``auto`` takes cuda, then npu, then cpu.

    Raises:
        ConfigError: an unknown name, or a device that this machine does not have.
    """
    present: dict[str, Callable[[], bool]] = {"cuda": has_gpus, "npu": _has_npu, "cpu": lambda: True}
    if wanted == "auto":
        usable = (
            name for name, is_present in present.items() if is_present() and count_devices(cast(DeviceType, name))
        )
        return cast(DeviceType, next(usable))
    if wanted not in present:
        raise ConfigError(f"device = {wanted!r}", "must be auto, cpu, cuda or npu", OVERRIDE)
    if not present[wanted]():
        looked = {"cuda": "no NVIDIA driver and no nvidia-smi", "npu": "no /dev/davinci*"}[wanted]
        raise ConfigError(f"device = {wanted!r}", f"this machine has none ({looked})", OVERRIDE)
    if count_devices(cast(DeviceType, wanted)) == 0:
        variable = VISIBLE[wanted]
        raise ConfigError(f"device = {wanted!r}", f"none is visible ({variable}={os.environ.get(variable)})", OVERRIDE)
    return cast(DeviceType, wanted)


def devices_here(wanted: str, may_be_absent: bool) -> tuple[DeviceType, int]:
    """The device type to run on and how many of them are here; one that may be absent counts as 1 where it is."""
    try:
        device = choose_device(wanted)
    except ConfigError:
        if not may_be_absent or wanted not in get_args(DeviceType):
            raise
        return cast(DeviceType, wanted), 1
    return device, count_devices(device)


def count_devices(device: DeviceType) -> int:
    """Devices of this type that a job may use here, as the vendor's visibility variable limits them; CPU: 1.

    Raises:
        ConfigError: neither NVIDIA's driver nor its tool tells.
    """
    if device == "cpu":
        return 1
    visible = os.environ.get(VISIBLE[device])
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    count = len(npu_numbers()) if device == "npu" else num_gpus()
    if count is None:
        raise ConfigError("device = 'cuda'", "nvidia-smi does not answer, or fails", OVERRIDE)
    return count


def _has_npu() -> bool:
    return bool(npu_numbers())
