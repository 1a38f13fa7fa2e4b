"""The split of a job over its devices, and the arithmetic of its batch. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # mesh order: tensor parallel on neighbouring ranks


@dataclass(frozen=True)
class Strategy:
    """Degrees of every axis, and how a step runs on them.

    ``stages`` holds the number of blocks of each pipeline stage (sum: all blocks of the model);
    ``recompute`` the number of blocks of each stage, from its first, whose activations are
    recomputed in the backward pass (-1: all).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    reshard: bool = True
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    micro_batch_size: int = 1
    recompute: int = 0
    stages: tuple[int, ...] = ()

    @property
    def dp(self) -> int:
        """Number of data ranks: groups of devices that see different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def num_micro_batches(self, global_batch_size: int) -> int:
        """M = G / (dp m); exact, since :func:`resolve` refuses a remainder."""
        return global_batch_size // (self.dp * self.micro_batch_size)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"stages": list(self.stages)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Strategy:
        return cls(**(data | {"stages": tuple(data["stages"])}))

    def __str__(self) -> str:
        degrees = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(degrees) or "one device"
