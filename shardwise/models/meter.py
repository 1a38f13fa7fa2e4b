"""What the parts of a model do in a pass, forward and backward, seen operator by operator on fake tensors.

Every operator that reaches the device passes by here with its shapes: matrix products, the core of attention, and all
others with the bytes that they read and write; and what autograd keeps. No memory is used and no number computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensors = list[torch.Tensor]
_PRODUCTS = ("mm", "addmm")
_BATCHED = ("bmm", "baddbmm")


@dataclass(frozen=True)
class MeteredProduct:
    """A product [tokens, inner] x [inner, outer] in a pass; ``copies`` matrices side by side share the tokens."""

    parameter: str | None
    tokens: int
    inner: int
    outer: int
    copies: int = 1


@dataclass(frozen=True)
class MeteredCore:
    """A product of two activations for ``heads`` heads of all rows: [queries, inner] x [inner, outer]."""

    heads: int
    queries: int
    inner: int
    outer: int


@dataclass
class Saved:
    """A storage that is kept: its bytes, whether of a stack of experts; ``half``: its elements have two bytes."""

    num_bytes: int
    of_experts: bool
    half: bool


@dataclass
class Tally:
    """One part of a model in one direction; bytes for the whole pass."""

    traffic: int = 0
    half_traffic: int = 0  # of these, bytes of tensors whose elements have two
    expert_traffic: int = 0
    operators: int = 0
    products: list[MeteredProduct] = field(default_factory=list)
    cores: list[MeteredCore] = field(default_factory=list)
    fused: list[tuple[int, int, int]] = field(default_factory=list)  # heads, width of a query, of a value
    saved: dict[int, Saved] = field(default_factory=dict)  # by autograd
    results: dict[int, Saved] = field(default_factory=dict)  # of products and of attention
    sent: list[tuple[str, int]] = field(default_factory=list)  # collective, elements of the whole tensor
    entry_bytes: int = 0
    last_result: int | None = None


class Meter(TorchDispatchMode):
    """Tallies by (part, is the backward pass). ``part`` None: not counted.

    Args:
        parameters: storage -> name of the weight in it.
        rows: of the pass, which heads are counted by.
    """

    def __init__(self, parameters: Mapping[int, str], rows: int) -> None:
        super().__init__()
        self.parameters, self.rows = parameters, rows
        self.tallies: dict[tuple[str, bool], Tally] = defaultdict(Tally)
        self.part: str | None = None
        self.backward = False
        self.in_experts = False
        self._kept: Tensors = []  # alive, so that keys stay theirs

    @property
    def tally(self) -> Tally:
        """Of the part that runs."""
        assert self.part is not None
        return self.tallies[self.part, self.backward]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.part is not None:
            self._note(func, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.overloadpacket.__name__
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if not outputs or _is_view(func, inputs, outputs):
            return
        tally = self.tally
        tally.operators += 1
        if self._product(name, inputs, outputs[0]):
            return
        if "scaled_dot_product" in name or "flash_attention" in name:
            if not self.backward:
                query, _, value = inputs[:3]
                tally.fused.append((query.shape[1], query.shape[-1], value.shape[-1]))
                self._result(outputs)
            return
        moved = [(_bytes(tensor), tensor.element_size() == 2) for tensor in (*inputs, *outputs)]
        everything = sum(size for size, _ in moved)
        if self.in_experts:
            tally.expert_traffic += everything
        else:
            tally.traffic += everything
            tally.half_traffic += sum(size for size, half in moved if half)

    def _product(self, name: str, inputs: Tensors, out: torch.Tensor) -> bool:
        """Note a matrix product; what it costs backward follows from its shape."""
        if name in _PRODUCTS:
            left, right = inputs[-2:]
            tokens, copies = left.shape[0], 1
        elif name == "_grouped_mm":
            left, right = inputs[:2]
            tokens, copies = left.shape[0], right.shape[0]
        elif name in _BATCHED:
            left, right = inputs[-2:]
            tokens, copies = left.shape[0] * left.shape[1], left.shape[0]
        else:
            return False
        if self.backward:
            return True
        weight = next((n for t in (right, left) if (n := self.parameters.get(_storage(t))) is not None), None)
        if name in _BATCHED and weight is None:
            self.tally.cores.append(
                MeteredCore(left.shape[0] // self.rows, left.shape[1], left.shape[2], right.shape[-1])
            )
        else:
            product = MeteredProduct(weight, tokens, left.shape[-1], right.shape[-1], copies)
            self.tally.products.append(product)
        self._result([out])
        return True

    def _result(self, outputs: Tensors) -> None:
        for tensor in outputs:
            self._kept.append(tensor)
            self.tally.results[_storage(tensor)] = Saved(_bytes(tensor), self.in_experts, tensor.element_size() == 2)
        self.tally.last_result = _storage(outputs[0])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd's question before it keeps a tensor."""
        key = _storage(tensor)
        if self.part is not None and not self.backward and key not in self.parameters:
            self._kept.append(tensor)
            size = tensor.untyped_storage().nbytes()
            self.tally.saved.setdefault(key, Saved(size, self.in_experts, tensor.element_size() == 2))
        return tensor

    def sent(self, op: str, elements: int) -> None:
        """A collective of the tensor axis."""
        if self.part is not None:
            self.tally.sent.append((op, elements))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that reading a tensor moves: an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))


def _is_view(func: Any, inputs: Tensors, outputs: Tensors) -> bool:
    """Whether nothing is computed."""
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    known = {_storage(tensor) for tensor in inputs}
    return not written and bool(inputs) and all(_storage(tensor) in known for tensor in outputs)


@contextmanager
def metered_block(meter: Meter, block: nn.Module, part: str | None, like: Callable[[Any], Any]) -> Iterator[None]:
    """Count what ``block`` does under ``part``, or let its hidden state pass (None).

    Args:
        like: what a block returns for a hidden state that passes; it is asked after a block of the kind has run.
    """
    own = block.forward

    def passes(*args: Any, **kwargs: Any) -> Any:
        return like(args[0] if args else kwargs["hidden_states"])

    def counted(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        before, meter.part = meter.part, None
        entry = hidden.view_as(hidden)
        meter.part = part
        others = [t for t in tree_leaves((args[1:], kwargs)) if isinstance(t, torch.Tensor) and t is not hidden]
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda tensor: tensor):
            out = own(*(entry, *args[1:]), **kwargs) if args else own(**(kwargs | {"hidden_states": entry}))
        _finish(meter, hidden, others)
        result = out[0] if isinstance(out, tuple) else out
        _backward_hooks(meter, part, entry, result)
        meter.part = before
        return out

    block.forward = passes if part is None else counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        block.forward = own  # type: ignore[method-assign]


def _finish(meter: Meter, hidden: torch.Tensor, others: Tensors) -> None:
    """What a block was given is kept once for all blocks, but its own hidden state."""
    tally = meter.tally
    tally.entry_bytes = _bytes(hidden)
    for tensor in others:
        tally.saved.pop(_storage(tensor), None)
    own = tally.saved.get(_storage(hidden))
    if own is not None:
        own.num_bytes = min(own.num_bytes, tally.entry_bytes)


def _backward_hooks(meter: Meter, part: str | None, entry: torch.Tensor, result: torch.Tensor) -> None:
    def begin(_grad: torch.Tensor) -> None:
        meter.part = part

    def end(_grad: torch.Tensor) -> None:
        meter.part = "embedding" if part == "block 0" else None

    if result.requires_grad:
        result.register_hook(begin)
    if entry.requires_grad:
        entry.register_hook(end)
