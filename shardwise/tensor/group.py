"""The ranks that share a tensor split: real processes, or threads that stand in for them.

Every collective of the tensor axis goes through a :class:`TensorGroup`, so that the code which trains is the
code which is proven on a small copy in one process.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol

import torch
import torch.distributed as dist


class TensorGroup(Protocol):
    """One rank's end of the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's index."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place; ``tensor`` is contiguous."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, *shape]: the ranks' tensors, which have one shape."""

    def reduce_scatter(self, tensors: torch.Tensor) -> torch.Tensor:
        """Of [size, *shape] on every rank, the sum over the ranks of this rank's entry."""


class ProcessTensorGroup:
    """A group of torch.distributed."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.process_group)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_single(gathered, tensor.contiguous(), group=self.process_group)
        return gathered.unflatten(0, (self.size, -1))

    def reduce_scatter(self, tensors: torch.Tensor) -> torch.Tensor:
        tensors = tensors.contiguous()
        out = torch.empty_like(tensors[0])
        dist.reduce_scatter_single(out, tensors.flatten(0, 1), group=self.process_group)
        return out


class LonelyTensorGroup:
    """The first of ``size`` ranks without the others: shapes are those of a real group, numbers are not."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Nothing is added."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor.detach()] * self.size)

    def reduce_scatter(self, tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].detach().clone()


class _Meeting:
    """Where the threads of a simulated group exchange tensors."""

    def __init__(self, size: int, timeout: float) -> None:
        self.slots: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.moved: Counter[str] = Counter()


class SimulatedTensorGroup:
    """Ranks that are threads of one process.

    ``moved`` counts, over all collectives, the elements that one rank sends at ring cost (Patarasuk and Yuan 2009):
    an all-reduce of n elements moves 2 n (p - 1) / p, a gather or a reduce-scatter half of it.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.slots)

    @classmethod
    def make(cls, size: int, timeout: float = 60.0) -> list[SimulatedTensorGroup]:
        """The ends of a new group, one a thread."""
        meeting = _Meeting(size, timeout)
        return [cls(meeting, rank) for rank in range(size)]

    @property
    def moved(self) -> dict[str, float]:
        """Elements moved by kind of collective, those of one rank."""
        return {kind: count / self.size for kind, count in self._meeting.moved.items()}

    def abort(self) -> None:
        """Release the other threads: this one will not come."""
        self._meeting.barrier.abort()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))
        self._count("all_reduce", 2 * tensor.numel())
        self._meeting.barrier.wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.stack(self._exchange(tensor))
        self._count("all_gather", out.numel())
        self._meeting.barrier.wait()
        return out

    def reduce_scatter(self, tensors: torch.Tensor) -> torch.Tensor:
        out = torch.stack([theirs[self.rank] for theirs in self._exchange(tensors)]).sum(0)
        self._count("reduce_scatter", tensors.numel())
        self._meeting.barrier.wait()
        return out

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copies of all ranks' tensors; the caller waits once more before the next exchange begins."""
        self._meeting.slots[self.rank] = tensor.detach().clone()
        self._meeting.barrier.wait()
        return [theirs for theirs in self._meeting.slots if theirs is not None]

    def _count(self, kind: str, elements: int) -> None:
        with threading.Lock():
            self._meeting.moved[kind] += elements * (self.size - 1) // self.size
