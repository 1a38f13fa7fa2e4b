"""What one pass through a model shows: the values that its parts make, and which parts read them.

The parts are the blocks and what runs before the first of them. Each tensor that a part returns, or writes into a
container among its arguments, is copied; in autograd's graph the copy marks where a later part takes it up. So what a
part needs of the earlier ones is found by walking the graph back to these marks. What autograd does not follow
(indices, masks) is followed operation by operation. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.models.origins import Origins

# Where a tensor lies in what a part makes: ("returned", 1) in a tuple, ("written", "shared", "full", 0) in the entry
# "full" of the container that the part was given as its argument "shared".
Place = tuple[Any, ...]
RETURNED, WRITTEN = "returned", "written"


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor, in which "rows" and "length" stand for those of a batch."""

    sizes: tuple[int | str, ...]
    dtype: torch.dtype

    def of(self, rows: int, length: int) -> tuple[int, ...]:
        """The sizes for a batch [rows, length]."""
        known = {"rows": rows, "length": length}
        return tuple(known[size] if isinstance(size, str) else size for size in self.sizes)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros for the batch of ``like`` [rows, length], on its device."""
        return torch.zeros(self.of(like.shape[0], like.shape[1]), dtype=self.dtype, device=like.device)


def template_of(value: Any, sizes: tuple[int, int]) -> Any:
    """What is known of a result beside its numbers: shapes, in tuples as the result has them.

    Args:
        sizes: rows and length of the pass that made it.
    """
    if isinstance(value, torch.Tensor):
        named: dict[int, str] = dict(zip(sizes, ("rows", "length"), strict=True))
        return Shape(tuple(named.get(size, size) for size in value.shape), value.dtype)
    return tuple(template_of(item, sizes) for item in value) if isinstance(value, tuple | list) else None


def filled(template: Any, place: Place, values: Mapping[Place, Any]) -> Any:
    """A result of the form of ``template`` that holds ``values`` at their places and None at all others."""
    if not isinstance(template, tuple):
        return values.get(place)
    items = tuple(filled(item, (*place, index), values) for index, item in enumerate(template))
    return items if any(item is not None for item in items) else None


def tensor_at(results: Any, place: Place) -> torch.Tensor:
    """The tensor of ``results`` at the indices ``place``."""
    for index in place:
        results = results[index]
    tensor: torch.Tensor = results
    return tensor


@dataclass
class Made:
    """A tensor that a part made.

    Args:
        module: the part.
        place: where the tensor lies in what the part made.
        border: the first border between blocks that the tensor can cross: 0 before the blocks, i + 1 after block i.
        tensor: the copy that the pass went on with.
        made: indices of the values that it was computed from, up to the first on each way.
        leaves: identities of the parameters on these ways.
        last: the last border behind which it is read.
        call: of how many before it in which the part ran.
    """

    module: str
    place: Place
    border: int
    tensor: torch.Tensor
    made: set[int]
    leaves: set[int]
    last: int = -1
    call: int = 0


@dataclass
class Recorder:
    """Hooks on the parts of a model, and what they saw in one pass of the rows and the length ``sizes``."""

    names: Sequence[str]  # of the blocks
    sizes: tuple[int, int]
    order: list[int] = field(default_factory=list)  # the blocks that ran
    keys: set[int | str] = field(default_factory=set)  # of the hidden state among a block's arguments
    forms: set[tuple[int, int]] = field(default_factory=set)  # (length of what a block returns, place of the state)
    values: list[Made] = field(default_factory=list)
    hidden: dict[int, int] = field(default_factory=dict)  # block -> the value that is its hidden state
    leaves: dict[int, set[int]] = field(default_factory=dict)  # block -> parameters that it depends on by itself
    templates: dict[str, Any] = field(default_factory=dict)  # module -> the form of what it returns
    written: dict[str, dict[tuple[Any, Any], Any]] = field(default_factory=dict)  # block -> entries that it writes
    calls: dict[str, int] = field(default_factory=dict)  # module before the blocks -> how often it ran
    uneven: set[str] = field(default_factory=set)  # modules outside of the blocks that return unlike shapes
    changed_inside: dict[int, int] = field(default_factory=dict)  # value -> the first block that changes it in place
    broken: str | None = None  # the first rule that the pass broke
    origins: Origins = field(default_factory=Origins)  # entered by whoever runs the pass
    _nodes: dict[Any, int] = field(default_factory=dict)  # node of the graph -> value
    _entries: dict[tuple[Any, Any], list[int]] = field(default_factory=dict)  # of the containers given to a block
    _versions: list[int] = field(default_factory=list)  # of all values when the block began
    _received: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # its other tensors, and their versions
    _inside: dict[Any, int] = field(default_factory=dict)  # node of the graph -> block that changed its tensor in place

    def part_hook(self, name: str, *, is_part: bool) -> Any:
        """A forward hook of a module outside of the blocks; ``is_part``: later blocks may read what it returns."""

        def after(_module: nn.Module, _args: Any, _kwargs: Any, out: Any) -> Any:
            template = template_of(out, self.sizes)
            if self.templates.setdefault(name, template) != template:
                self.uneven.add(name)
            if not is_part or self.order:
                return None
            call, first = self.calls.get(name, 0), len(self.values)
            self.calls[name] = call + 1
            out = self._marked(out, name, (RETURNED,), 0)
            for value in self.values[first:]:
                value.call = call
            return out

        return after

    def block_hooks(self, index: int) -> tuple[Any, Any]:
        """Hooks that note what block ``index`` receives and makes; what is wrong is told after the pass."""

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._enter(index, _given(args, kwargs))

        def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            return self._leave(index, _given(args, kwargs), out)

        return before, after

    def _enter(self, index: int, given: dict[int | str, Any]) -> None:
        source = f"block {self.order[-1]}" if self.order else "the embedding"
        previous = self.hidden.get(self.order[-1]) if self.order else None
        key = self._state_key(given, previous)
        if key is None:
            self._break(f"block {index} does not receive what {source} returns")
        elif previous is not None and self.values[previous].tensor._version:
            self._break(f"what {source} returns is changed in place before block {index} receives it")
        else:
            self.keys.add(key)
        self.order.append(index)
        self._entries = {place: [id(t) for t in _tensors(entry)] for place, entry in _entries(given)}
        self._versions = [value.tensor._version for value in self.values]
        values = {id(value.tensor) for value in self.values}
        self._received = [(t, t._version) for t in _tensors(given) if t.requires_grad and id(t) not in values]

    def _state_key(self, given: dict[int | str, Any], previous: int | None) -> int | str | None:
        """Which argument is the hidden state ``previous``, or was computed from it by the model (a slice of it)."""
        found = [key for key, value in given.items() if has_gradient(value)]
        if previous is None:
            return found[0] if found else None
        same = [key for key in found if given[key] is self.values[previous].tensor]
        return next(iter(same or [key for key in found if previous in self._reached(given[key])[0]]), None)

    def _leave(self, index: int, given: dict[int | str, Any], out: Any) -> Any:
        for number, version in enumerate(self._versions):
            if self.values[number].tensor._version > version:
                self.changed_inside.setdefault(number, index)
        place, length = 0, 0
        if isinstance(out, tuple | list):
            length = len(out)
            place = next((i for i, item in enumerate(out) if has_gradient(item) and item.dim() == 3), 0)
        if not has_gradient(out[place] if length else out):
            self._break(f"block {index} returns no hidden state but a {type(out).__name__}")
            return out
        self.forms.add((length, place))
        name, first = self.names[index], len(self.values)
        self.templates[name], self.written[name] = template_of(out, self.sizes), {}
        for (key, item), entry in list(_entries(given)):
            if [id(t) for t in _tensors(entry)] != self._entries.get((key, item), []):
                self.written[name][key, item] = template_of(entry, self.sizes)
                given[key][item] = self._marked(entry, name, (WRITTEN, key, item), index + 1)
        out = self._marked(out, name, (RETURNED,), index + 1)
        self.leaves[index] = set()
        for value in self.values[first:]:
            self.leaves[index] |= value.leaves
            for read in value.made:
                self._read(read, index)
        state = (RETURNED, place) if length else (RETURNED,)
        self.hidden[index] = next(n for n in range(first, len(self.values)) if self.values[n].place == state)
        if index < len(self.names) - 1:  # what is behind the last block is of its stage
            self._inside |= {t.grad_fn: index for t, version in self._received if t._version > version}
        return out

    def finish(self, logits: torch.Tensor) -> set[int]:
        """The parameters behind the blocks that ``logits`` depend on; notes the values that are read there."""
        read, leaves = self._reached(logits)
        for number in read:
            self._read(number, len(self.names))
        return leaves

    def parameters(self) -> list[set[int]]:
        """For each value the identities of all parameters that it depends on."""
        found: list[set[int]] = []
        for value in self.values:  # in the order in which they were made
            found.append(value.leaves.union(*(found[number] for number in value.made)))
        return found

    def _break(self, rule: str) -> None:
        self.broken = self.broken or rule

    def _read(self, number: int, border: int) -> None:
        self.values[number].last = max(self.values[number].last, border)

    def _marked(self, result: Any, module: str, place: Place, border: int) -> Any:
        """``result`` with copies of its tensors, each a value."""
        if isinstance(result, tuple | list):
            items = [self._marked(item, module, (*place, index), border) for index, item in enumerate(result)]
            return items if isinstance(result, list) else tuple(items)
        if not isinstance(result, torch.Tensor):
            return result
        made, leaves = self._reached(result)
        copied = result.clone()  # the model may change it in place
        if result.requires_grad:
            self._nodes[copied.grad_fn] = len(self.values)
        self.origins.mark(copied, len(self.values))
        self.values.append(Made(module, place, border, copied, made, leaves))
        return copied

    def _reached(self, tensor: torch.Tensor) -> tuple[set[int], set[int]]:
        """The values that ``tensor`` was computed from, up to the first on each way, and the leaves on the ways."""
        made = set(self.origins.of(tensor))
        leaves: set[int] = set()
        seen, waiting = set(), [tensor.grad_fn]
        if tensor.grad_fn is None:
            return made, {id(tensor)} if tensor.requires_grad else set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._inside:
                self._break(f"block {self._inside[node]} changes in place what it receives, and that is read later")
            if node in self._nodes:
                made.add(self._nodes[node])
                continue
            if hasattr(node, "variable"):
                leaves.add(id(node.variable))
            waiting.extend(parent for parent, _ in node.next_functions)
        return made, leaves


def has_gradient(value: Any) -> bool:
    """Whether ``value`` is a tensor that autograd follows."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    given: dict[int | str, Any] = dict(enumerate(args))
    return given | kwargs


def _entries(given: Mapping[Any, Any]) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """The entries of the containers among a block's arguments that it can write to."""
    for key, container in given.items():
        if isinstance(container, MutableMapping):
            for item, entry in container.items():
                yield (key, item), entry


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
    return [t for item in items for t in _tensors(item)] if isinstance(value, Mapping | list | tuple) else []
