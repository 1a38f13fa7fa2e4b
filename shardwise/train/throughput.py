"""How fast a step was: FLOPs a second of each device, and their share of its peak."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardwise.models.lora import is_adapter
from shardwise.models.shard import Shard
from shardwise.spec.flops import peak_flops, step_flops
from shardwise.spec.plan import Plan
from shardwise.train.step import sum_over_ranks


def device_name(device: torch.device) -> str | None:
    """The driver's name of a device; None for the CPU, whose peak nobody states."""
    return None if device.type == "cpu" else str(torch.get_device_module(device.type).get_device_name(device))


def count_adapter_parameters(shards: Iterable[Shard], device: torch.device) -> int | None:
    """Elements of all LoRA matrices over all ranks, each once; None where there are none and everything trains.

    Copies that train beside the adapters (``modules_to_save``) count as frozen. To be called by all ranks.
    """
    pieces = [piece for shard in shards if is_adapter(shard.layout.name) for piece in shard.layout.pieces]
    (total,) = sum_over_ranks([float(sum(piece.num_elements for piece in pieces if piece.owned))], device)
    return int(total) or None


class Throughput:
    """Turns the rows and the seconds of a step into the numbers of the metrics."""

    def __init__(self, plan: Plan, precision: str, name: str | None, num_adapter_parameters: int | None) -> None:
        self._model, self._devices = plan.model, plan.devices
        self._peak = peak_flops(name, precision)
        self._adapters = num_adapter_parameters

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float | None]:
        """``tflops_per_device`` and ``mfu`` (null where the peak is unknown) of a step over rows of ``lengths``.

        Both are null where nothing was computed (no rows given).
        """
        if not lengths or seconds <= 0:
            return {"mfu": None, "tflops_per_device": None}
        speed = step_flops(self._model, lengths, self._adapters) / seconds / self._devices
        return {"mfu": None if self._peak is None else speed / self._peak, "tflops_per_device": speed / 1e12}
