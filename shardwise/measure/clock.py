"""How long an operation takes on each of several ranks that all do it at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Clock:
    """Times operations while every rank is at work, as in a run.

    Ranks that are more than the cores take turns of milliseconds, so a single operation says nothing: each rank
    repeats its operation until a time that all have agreed on, and the mean over that span counts.

    Args:
        seconds: of one span; ``rounds`` of them, whose median is the answer.
    """

    device: torch.device
    seconds: float
    rounds: int

    def alone(self, operation: Callable[[], object]) -> float:
        """Seconds of an operation without communication: the median over rounds of the mean over ranks."""
        operation()
        found = []
        for _ in range(self.rounds):
            dist.barrier()
            began, number = time.perf_counter(), 0
            while number == 0 or time.perf_counter() - began < self.seconds:
                operation()
                number += 1
                self._wait()
            found.append(self._mean((time.perf_counter() - began) / number))
        return statistics.median(found)

    def together(self, operation: Callable[[], object]) -> float:
        """Seconds of an operation that all ranks take part in; each repeats it equally often."""
        for _ in range(2):  # the first opens connections
            operation()
        self._wait()
        dist.barrier()
        began = time.perf_counter()
        operation()
        self._wait()
        once = self._mean(time.perf_counter() - began)
        number = max(1, min(200, round(self.seconds / max(once, 1e-6))))
        found = []
        for _ in range(self.rounds):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(number):
                operation()
            self._wait()
            found.append(self._mean((time.perf_counter() - began) / number))
        return statistics.median(found)

    def _wait(self) -> None:
        if self.device.type != "cpu":  # written for cuda and npu, never run there
            torch.get_device_module(self.device.type).synchronize()

    def _mean(self, value: float) -> float:
        total = torch.tensor([value], dtype=torch.float32, device=self.device)
        dist.all_reduce(total)
        return float(total.item()) / dist.get_world_size()
