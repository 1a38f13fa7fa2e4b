"""What a process learns of its job from its environment: its place in it, and what the command line has preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.config import apply_overrides
from shardwise.errors import ConfigError
from shardwise.launch.forkserver import LAUNCHER_PID

DEFAULT_TARGET = "shardwise.train.worker:train"  # what a worker calls
PRESETS = "SHARDWISE_PRESETS"  # key=value entries, as a JSON list, that win over what a script says
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


@dataclass(frozen=True)
class Place:
    """A worker's place in its job; ``ours``: it was started by our launcher, which shows its output and its end."""

    rank: int
    local_rank: int
    world_size: int
    ours: bool


@dataclass(frozen=True)
class Nodes:
    """The machines of a job; ``endpoint`` is ``host:port`` on machine 0, None where there is one machine."""

    count: int = 1
    rank: int = 0
    endpoint: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether all processes reach each other over the loopback device."""
        host = (self.endpoint or "127.0.0.1").rpartition(":")[0] or "127.0.0.1"
        return host.startswith("127.") or host == "localhost"


def current_place(environ: Mapping[str, str]) -> Place | None:
    """The place that a launcher (ours, torchrun or another with the same variables) gave this process, or None."""
    if any(name not in environ for name in _NEEDED):
        return None
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
    except ValueError:
        shown = ", ".join(f"{name}={environ[name]}" for name in ("RANK", "WORLD_SIZE"))
        raise ConfigError(shown, "are the place in a job, and must be numbers", "Unset them, or use torchrun") from None
    return Place(rank, local_rank, world_size, LAUNCHER_PID in environ)


def presets(environ: Mapping[str, str]) -> list[str]:
    """The ``key=value`` entries that ``shardwise run`` was given."""
    entries: list[str] = json.loads(environ.get(PRESETS, "[]"))
    return entries


def preset_tree(environ: Mapping[str, str]) -> dict[str, Any]:
    """The presets as a tree of keys."""
    return apply_overrides({}, presets(environ))
