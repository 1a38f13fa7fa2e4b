"""What this machine offers to a job now: its cores, and the memory that it can still give away. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

_ROOT = Path("/")
_NO_LIMIT = 2**60  # cgroup v1 writes "no limit" as a number near 2**63
_V1, _V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name(root: Path = _ROOT) -> str:
    """The processor as its vendor names it, with its number of cores; what a measurement holds for."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{model[1].strip() if model else platform.processor() or platform.machine()}, {available_cores()} cores"


def free_memory_bytes(root: Path = _ROOT) -> float | None:
    """Bytes that processes can still take: what the kernel calls available, within every limit of a control group.

    None where the system tells neither. File pages that a group holds and could drop count as free.
    """
    found = [*_kernel_bytes(root), *_group_bytes(root)]
    return float(max(0, min(found))) if found else None


def _kernel_bytes(root: Path) -> list[int]:
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return []
    line = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return [int(line[1]) * 1024] if line else []


def _group_bytes(root: Path) -> list[int]:
    """What each control group above this process leaves, under both versions of the interface."""
    free = []
    for folder, names in _group_folders(root):
        limit, usage = (_number(folder / name) for name in names)
        if limit is not None and usage is not None and limit < _NO_LIMIT:
            free.append(limit - usage + _droppable(folder))
    return free


def _group_folders(root: Path) -> list[tuple[Path, tuple[str, str]]]:
    """The group of this process and those above it; a container may see its own group as the root of all."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = [(base, _V2), (base / "memory", _V1)]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top, names = (base, _V2) if not controllers else (base / "memory", _V1)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = top / path.lstrip("/")
        while folder != top and folder.is_relative_to(top):
            found.append((folder, names))
            folder = folder.parent
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _droppable(folder: Path) -> int:
    try:
        text = (folder / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 0
    line = re.search(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
    return int(line[1]) if line else 0
