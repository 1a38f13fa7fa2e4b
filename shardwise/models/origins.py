"""Which marked tensors a tensor was computed from, by whatever operations: also those that autograd does not follow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Origins(TorchDispatchMode):
    """While it is entered, every operation hands the marks of the tensors that it reads on to those that it makes.

    Marks belong to memory, so a view has those of its base. Operations that read a size and no numbers
    (``zeros_like``) hand nothing on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marks: dict[int, frozenset[int]] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that identities stay their own

    def mark(self, tensor: torch.Tensor, mark: int) -> None:
        """``tensor`` is where what is computed from it begins."""
        self._set(tensor, frozenset((mark,)))

    def of(self, tensor: torch.Tensor) -> frozenset[int]:
        """The marks of ``tensor``."""
        return self._marks.get(tensor.untyped_storage()._cdata, frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.endswith("_like") or name.startswith("new_"):
            return out
        read = _tensors((args, kwargs))
        marks = frozenset().union(*(self.of(tensor) for tensor in read))
        if marks:
            for made in _tensors(out):
                self._set(made, marks | self.of(made))
        return out

    def _set(self, tensor: torch.Tensor, marks: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._marks:
            self._kept.append(storage)
        self._marks[storage._cdata] = marks


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
