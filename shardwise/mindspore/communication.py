"""``communication``: the beginning and the end of a job, and a process's place in it."""

from __future__ import annotations

from shardwise.api.ambient import AMBIENT
from shardwise.api.contact import contact, devices_said, processes_without_trainer
from shardwise.errors import ConfigError
from shardwise.launch.place import Place
from shardwise.log import say

_BACKENDS = {None: None, "hccl": "npu", "nccl": "cuda", "mccl": "cpu"}


class _Holder:
    place: Place | None = None


def init(backend_name: str | None = None) -> None:
    """Begin the job. In a process that no launcher started, the job is started and nothing after this line runs.

    Args:
        backend_name: "hccl", "nccl" or "mccl"; the backend follows from the device, so this is only checked.

    Raises:
        ConfigError: an unknown backend, another ``device_num`` than the job has, or no script to start.
    """
    if backend_name not in _BACKENDS:
        names = ", ".join(name for name in _BACKENDS if name)
        raise ConfigError(f"backend_name = {backend_name!r}", f"must be one of {names}", "Leave it out")
    if backend_name is not None:
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


def get_rank() -> int:
    """This process's place among all of the job, from 0."""
    return _begun("get_rank").rank


def get_group_size() -> int:
    """Number of processes of the job."""
    return _begun("get_group_size").world_size


def _begun(name: str) -> Place:
    if _Holder.place is None:
        raise ConfigError(f"communication.{name}()", "the job has not begun", "Call communication.init() first")
    return _Holder.place
