"""Which devices this machine has, and which still answer: after a failure one may be lost. Imports no torch.

The visibility variable says what a job may use, not what is there. Written by the vendors' documentation, and never run
on a machine that has lost a device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.spec.plan import DeviceType

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_DEV = Path("/dev")
_NVIDIA = Path("/proc/driver/nvidia")
ANSWER_SECONDS = 60
_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (\S+)\)\s*$", re.MULTILINE)
_MIG = re.compile(r"\(UUID: (MIG-\S+)\)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Alive:
    """The devices that a job may use and that answer.

    Attributes:
        names: as the visibility variable is to name them; GPUs by identity, since their numbers move when one is lost.
        lost: those that the variable names, and that do not answer; without it, the numbers that are missing.
    """

    device: DeviceType
    names: tuple[str, ...]
    lost: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        """What makes a worker use these and no others."""
        return {VISIBLE[self.device]: ",".join(self.names)}


def alive_devices(device: DeviceType, environ: Mapping[str, str]) -> Alive | None:
    """The living devices of this type; None where nothing can tell: on a CPU, or where the vendor's tool is
    absent, hangs or names no device at all, and where none of the NPUs that the variable names has a file: in a
    container its numbers may be logical ones."""
    if device == "cpu":
        return None
    if device == "npu":
        numbers = npu_numbers()
        alive = _visible(device, numbers, (), environ.get(VISIBLE[device]))
        return None if not numbers or (alive.lost and not alive.names) else alive
    listing = _listing()
    if listing is None:
        return None
    gpus = _GPU.findall(listing)
    if not gpus:
        return None
    identities = [identity for _, identity in gpus] + _MIG.findall(listing)
    by_index = dict(gpus)
    if environ.get(VISIBLE["cuda"]) is None:  # by identity: the driver may count in another order than its tool
        gone = (str(index) for index in range(max(map(int, by_index))) if str(index) not in by_index)
        return Alive(device, tuple(by_index.values()), tuple(gone))
    alive = _visible(device, list(by_index), identities, environ[VISIBLE["cuda"]])
    return replace(alive, names=tuple(by_index.get(name, name) for name in alive.names))


def has_gpus() -> bool:
    """Whether there is an NVIDIA driver, or its tool."""
    return _NVIDIA.exists() or shutil.which("nvidia-smi") is not None


def num_gpus() -> int | None:
    """GPUs by the driver's list, which answers at once and holds lost ones as well; where it is not readable by
    nvidia-smi's. None where neither can be asked."""
    listed = _NVIDIA / "gpus"
    if listed.is_dir():
        return len(list(listed.iterdir()))
    listing = _listing()
    return None if listing is None else len(_GPU.findall(listing))


def npu_numbers() -> list[str]:
    """Of ``/dev/davinci0`` and so on; ``davinci_manager`` is no device."""
    found = (re.fullmatch(r"davinci(\d+)", path.name) for path in _DEV.glob("davinci*"))
    return sorted((match[1] for match in found if match), key=int)


def _visible(device: DeviceType, indices: list[str], identities: Sequence[str], variable: str | None) -> Alive:
    """What ``variable`` names: an index, or the beginning of an identity."""
    if variable is None:
        return Alive(device, tuple(indices))
    names = [name.strip() for name in variable.split(",") if name.strip() not in ("", "-1")]
    answers = [name in indices or any(each.startswith(name) for each in identities) for name in names]
    alive = tuple(name for name, answer in zip(names, answers, strict=True) if answer)
    return Alive(device, alive, tuple(name for name in names if name not in alive))


def _listing() -> str | None:
    """What nvidia-smi lists; None where it is not there, hangs or fails as a whole. It ends with an error when one
    device is lost, and names the others all the same."""
    command = ["nvidia-smi", "-L"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout if done.returncode == 0 or _GPU.search(done.stdout) else None
