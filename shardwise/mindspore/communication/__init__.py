"""``communication``: the beginning and the end of a job, and a process's place in it."""

from __future__ import annotations

from typing import NoReturn

from shardwise.api.ambient import AMBIENT
from shardwise.api.contact import contact, devices_said, num_local_ranks, processes_without_trainer
from shardwise.errors import ConfigError
from shardwise.launch.place import Place
from shardwise.log import say
from shardwise.mindspore.absent import refuse

__all__ = [
    "HCCL_WORLD_COMM_GROUP",
    "MCCL_WORLD_COMM_GROUP",
    "NCCL_WORLD_COMM_GROUP",
    "GlobalComm",
    "get_group_size",
    "get_local_rank",
    "get_local_rank_size",
    "get_process_group_ranks",
    "get_rank",
    "init",
    "release",
]

HCCL_WORLD_COMM_GROUP = "hccl_world_group"
NCCL_WORLD_COMM_GROUP = "nccl_world_group"
MCCL_WORLD_COMM_GROUP = "mccl_world_group"
_WORLDS = (HCCL_WORLD_COMM_GROUP, NCCL_WORLD_COMM_GROUP, MCCL_WORLD_COMM_GROUP)
_BACKENDS = ("hccl", "nccl", "mccl")


class GlobalComm:
    """The name of the group of all processes."""

    WORLD_COMM_GROUP = HCCL_WORLD_COMM_GROUP


class _Holder:
    place: Place | None = None


def init(backend_name: str | None = None) -> None:
    """Begin the job. In a process that no launcher started, the job is started and nothing after this line runs.

    Args:
        backend_name: "hccl", "nccl" or "mccl"; the backend follows from the device, so this is only checked.

    Raises:
        ConfigError: an unknown backend, another ``device_num`` than the job has, or no script to start.
    """
    if backend_name is not None:
        if backend_name not in _BACKENDS:
            rule = f"must be one of {', '.join(_BACKENDS)}"
            raise ConfigError(f"backend_name = {backend_name!r}", rule, "Leave it out")
        say(f"init(backend_name={backend_name!r}) has no effect: the backend follows from the device")
    devices = devices_said(AMBIENT.device_num)
    _Holder.place = contact(lambda: devices or processes_without_trainer(), devices)


def release() -> None:
    """End the job's communication: the process group is closed, if a Trainer has opened it."""
    _begun("release")
    from shardwise.launch.script_worker import script_worker

    worker = script_worker()
    assert worker is not None
    worker.close_group()
    _Holder.place = None


def get_rank(group: str = GlobalComm.WORLD_COMM_GROUP) -> int:
    """This process's place among all of the job, from 0."""
    return _begun("get_rank", group).rank


def get_group_size(group: str = GlobalComm.WORLD_COMM_GROUP) -> int:
    """Number of processes of the job."""
    return _begun("get_group_size", group).world_size


def get_local_rank(group: str = GlobalComm.WORLD_COMM_GROUP) -> int:
    """This process's place among those of its machine, from 0."""
    return _begun("get_local_rank", group).local_rank


def get_local_rank_size(group: str = GlobalComm.WORLD_COMM_GROUP) -> int:
    """Number of the job's processes on this machine."""
    return num_local_ranks(_begun("get_local_rank_size", group))


def get_process_group_ranks(group: str = GlobalComm.WORLD_COMM_GROUP) -> list[int]:
    """The ranks of all processes of the job."""
    return list(range(_begun("get_process_group_ranks", group).world_size))


def __getattr__(name: str) -> NoReturn:
    """Refuse what MindSpore has in this module and Shardwise has not."""
    refuse(__name__, name)


def _begun(name: str, group: str = GlobalComm.WORLD_COMM_GROUP) -> Place:
    """The place of this process in the group of all, which is the only one with a name.

    Raises:
        ConfigError: another group, or the job has not begun.
    """
    if group not in _WORLDS:
        rule = "is no group: those of the split follow from the plan"
        raise ConfigError(f"communication.{name}(group={group!r})", rule, "Leave group out")
    if _Holder.place is None:
        raise ConfigError(f"communication.{name}()", "the job has not begun", "Call communication.init() first")
    return _Holder.place
