"""First contact: how many processes, and whether this is one of them already."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardwise.api.ambient import AMBIENT
from shardwise.errors import ConfigError
from shardwise.launch.contact import DEVICE_VARIABLE, start_job
from shardwise.launch.place import Place, current_place, preset_tree

__all__ = [
    "DEVICE_VARIABLE",
    "contact",
    "device_override",
    "devices_said",
    "num_local_ranks",
    "processes_without_trainer",
    "rank_here",
]


def contact(count: Callable[[], int], devices: int | None) -> Place:
    """This worker's place in its job. In a process that no launcher started, the job is started instead.

    Args:
        count: gives the number of processes to start; called in the first process only.
        devices: the number that has been said, None if none was.

    Raises:
        ConfigError: a number that is not that of the job's processes; or there is no script to start.
    """
    place = current_place(os.environ)
    if place is None:
        start_job(count())
    if place.ours:
        from shardwise.launch.script_worker import script_worker

        worker = script_worker()
        assert worker is not None
        worker.show_output()
    if devices is not None and devices != place.world_size:
        rule = f"the job has {place.world_size} processes"
        raise ConfigError(f"devices = {devices}", rule, f"Start {devices}, or use devices={place.world_size}")
    return place


def devices_said(device_num: int | None, in_trainer: int | None = None) -> int | None:
    """The number of processes that the script's ``device_num``, the command line and the Trainer ask for, if any does.

    Raises:
        ConfigError: ``device_num`` is not what another asks for, or what the job has. (MindSpore goes on, and scales
            gradients wrongly.)
    """
    preset = preset_tree(os.environ).get("devices")
    if device_num is None:
        return preset or in_trainer
    for source, other in (("--devices", preset), ("devices", in_trainer)):
        if other not in (None, device_num):
            rule = "must be equal: the script counts on this number of processes"
            raise ConfigError(f"device_num = {device_num} and {source} = {other}", rule, f"Use {device_num} for both")
    place = current_place(os.environ)
    if place is not None and place.world_size != device_num:
        rule = f"the job has {place.world_size} processes"
        raise ConfigError(f"device_num = {device_num}", rule, f"Start {device_num} processes")
    return device_num


def processes_without_trainer() -> int:
    """Number of processes before a Trainer is there: what the degrees in the context make, else all local devices."""
    from shardwise.launch.devices import choose_device, count_devices

    tree = AMBIENT.add_to({})
    product = 1
    for name in ("pp", "tp", "dp", "dp_replicate", "dp_shard"):
        product *= tree.get("strategy", {}).get(name) or 1
    wanted = device_override() or tree.get("device", "auto")
    local = count_devices(choose_device(wanted))
    return product if product > 1 or local == 1 else local


def device_override() -> str | None:
    """The device that the environment asks for, whatever a script says."""
    return os.environ.get(DEVICE_VARIABLE)


def rank_here() -> int | None:
    """This process's rank, None where no launcher started it."""
    place = current_place(os.environ)
    return place.rank if place else None


def num_local_ranks(place: Place) -> int:
    """Number of the job's processes on this machine; a launcher that does not say has one machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
