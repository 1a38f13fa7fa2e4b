"""Proof that a model is a chain of blocks, which is what a pipeline can cut.

The model's own ``forward`` runs once on fake tensors: shapes and autograd, no memory and no numbers. The
output of the embedding and of each block is replaced by a fresh leaf, so that autograd's graph tells what
each part depends on, by whatever way it got there. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.shrink import build_small, shrink
from shardwise.models.structure import Structure, find_structure
from shardwise.models.trace import LENGTH, ROWS, fake_forward, hooked, real_forward

Forward = Callable[[nn.Module], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class Chain:
    """What stands around the blocks, by module name, and how a block is called and answers.

    Args:
        before: modules with parameters that only the first stage needs, the token embedding left out.
        after: modules with parameters that only the last stage needs, the head left out.
        templates: what the modules of ``before`` and the embedding return, see :func:`template_of`.
        input_key: the place or the name of the hidden state among a block's arguments.
        num_outputs: 0 where a block returns its hidden state, else the length of the tuple that it returns.
        output_index: place of the hidden state in that tuple.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    templates: dict[str, Any] = field(default_factory=dict)
    input_key: int | str = 0
    num_outputs: int = 0
    output_index: int = 0


@dataclass(frozen=True)
class Shape:
    """The shape of a tensor; ``floating`` of numbers, else of indices."""

    sizes: tuple[int | str, ...]
    floating: bool

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros of this shape for the rows and the length of ``like`` [rows, length, ...]."""
        known = {"rows": like.shape[0], "length": like.shape[1]}
        shape = [known[size] if isinstance(size, str) else size for size in self.sizes]
        return like.new_zeros(shape, dtype=like.dtype if self.floating else torch.int64)


@dataclass
class _Record:
    """What happened in the pass, in its order."""

    order: list[int] = field(default_factory=list)
    keys: set[int | str] = field(default_factory=set)
    shapes: set[tuple[int, int]] = field(default_factory=set)  # (length of the output, place of the state)
    leaves: dict[int, str] = field(default_factory=dict)  # identity -> parameter, "embedding" or "block 3"
    last: torch.Tensor | None = None
    reached: dict[int, set[int]] = field(default_factory=dict)  # block -> leaves that its output depends on
    before: set[int] = field(default_factory=set)  # the leaves that the input of the first block depends on
    templates: dict[str, Any] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)  # identity of a further result -> block that returned it
    broken: str | None = None  # the first rule that the pass broke
    alive: list[torch.Tensor] = field(default_factory=list)  # so that identities stay their own


def find_chain(model: nn.Module, structure: Structure) -> Chain:
    """Run ``model`` (on meta) on fake tensors and check that it can be cut between any two blocks.

    A model that asks for numbers in its forward is checked on a small copy of it with real ones.

    Raises:
        PlanError: a block that runs more than once or out of order, that depends on more of the earlier
            blocks or of the embedding than its hidden state, or a head that does.
    """
    try:
        return _found(model, structure, fake_forward)
    except _Untraceable as error:
        if not isinstance(model, PreTrainedModel):
            raise error.refusal from None
    small = build_small(shrink(model.config), torch.float32)
    try:
        return _found(small, find_structure(small), real_forward)
    except _Untraceable as error:
        raise error.refusal from None


class _Untraceable(Exception):
    """The forward cannot be run in this way."""

    def __init__(self, refusal: PlanError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def _found(model: nn.Module, structure: Structure, forward: Forward) -> Chain:
    blocks = list(model.get_submodule(structure.blocks).children())
    record = _Record()
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.enter_context(hooked(block, *_block_hooks(record, index)))
        for name, module in model.named_modules():
            if name and not f"{name}.".startswith(f"{structure.blocks}."):
                stack.enter_context(hooked(module, None, _template_hook(record, name)))
        embedding = model.get_submodule(structure.embedding)
        stack.enter_context(hooked(embedding, None, lambda _m, _a, out: _leaf(record, out, "embedding")))
        try:
            logits, state = forward(model)
        except Exception as error:  # whatever the architecture does: it cannot be shown to be a chain
            rule = f"its forward cannot be traced ({type(error).__name__}: {error})"
            raise _Untraceable(_refusal(model, rule)) from error
    record.leaves.update({id(tensor): name for name, tensor in state.items()})
    if record.order != list(range(len(blocks))):
        raise _refusal(model, _order_rule(record.order, len(blocks)))
    if record.broken is not None:
        raise _refusal(model, record.broken)
    return _chain(model, structure, record, _names(record, _reached(logits)))


def _leaf(record: _Record, tensor: torch.Tensor, name: str) -> torch.Tensor:
    leaf = tensor.detach().requires_grad_()
    record.leaves[id(leaf)] = name
    record.alive.append(leaf)
    return leaf.clone()  # the model may change it in place, which a leaf does not allow


def _block_hooks(record: _Record, index: int) -> tuple[Any, Any]:
    """Hooks that note what the block receives and returns; what is wrong is told after the pass."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        record.order.append(index)
        key = next((k for k, v in given.items() if (v is record.last if index else _has_gradient(v))), None)
        if key is None:
            source = f"block {index - 1}" if index else "the embedding"
            record.broken = record.broken or f"block {index} does not receive what {source} returns"
            return None
        record.keys.add(key)
        passed = next((record.passed[id(t)] for t in _tensors(list(given.values())) if id(t) in record.passed), None)
        if passed is not None:
            record.broken = record.broken or f"block {index} receives more of block {passed} than its hidden state"
        if index:
            return None
        record.before = _reached(given[key])
        given[key] = _leaf(record, given[key], "input of block 0")
        return tuple(given[place] for place in range(len(args))), {k: v for k, v in given.items() if isinstance(k, str)}

    def after(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        place, length = 0, 0
        if isinstance(out, tuple | list):
            length = len(out)
            place = next((i for i, item in enumerate(out) if _has_gradient(item) and item.dim() == 3), 0)
        state = out[place] if length else out
        if not _has_gradient(state):
            record.broken = record.broken or f"block {index} returns no hidden state but a {type(out).__name__}"
            return out
        others = [tensor for item in (out if length else ()) for tensor in _tensors(item) if item is not state]
        record.passed.update({id(tensor): index for tensor in others})
        record.alive += others
        record.shapes.add((length, place))
        record.reached[index] = _reached(state)
        record.last = _leaf(record, state, f"block {index}")
        return (*out[:place], record.last, *out[place + 1 :]) if length else record.last

    return before, after


def _template_hook(record: _Record, name: str) -> Any:
    def after(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        record.templates[name] = template_of(out)

    return after


def template_of(value: Any) -> Any:
    """What is known of a result beside its numbers: shapes, in which "rows" and "length" stand for those of a batch."""
    if isinstance(value, torch.Tensor):
        named = {ROWS: "rows", LENGTH: "length"}
        return Shape(tuple(named.get(size, size) for size in value.shape), value.is_floating_point())
    return tuple(template_of(item) for item in value) if isinstance(value, tuple | list) else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _reached(tensor: torch.Tensor) -> set[int]:
    """Identities of the leaves that ``tensor`` was computed from."""
    leaves, seen, waiting = set(), set(), [tensor.grad_fn]
    if tensor.grad_fn is None:
        return {id(tensor)}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return leaves


def _order_rule(order: list[int], num_blocks: int) -> str:
    counts = [order.count(index) for index in range(num_blocks)]
    often = next((index for index, count in enumerate(counts) if count > 1), None)
    if often is not None:
        return f"its {num_blocks} blocks do not run once each, in order (block {often} runs {counts[often]} times)"
    return f"its {num_blocks} blocks do not run once each, in order (they run as {order})"


def _names(record: _Record, leaves: set[int]) -> set[str]:
    return {record.leaves.get(leaf, "a tensor of its own") for leaf in leaves}


def _chain(model: nn.Module, structure: Structure, record: _Record, after: set[str]) -> Chain:
    last = structure.num_blocks - 1
    for index, leaves in record.reached.items():
        reached = _names(record, leaves)
        allowed = f"block {index - 1}" if index else "input of block 0"
        inside = f"{structure.blocks}.{index}."
        for name in sorted(reached - {allowed}):
            if not name.startswith(inside):
                rule = f"block {index} depends on {_told(name)} by another way than its hidden state"
                raise _refusal(model, rule)
    tied = f"{structure.embedding}.weight" if structure.tied else ""
    behind, ahead = after - {f"block {last}", tied}, _names(record, record.before) - {"embedding"}
    foreign = sorted(
        name for name in behind if not _is_parameter(model, name) or name.startswith(f"{structure.blocks}.")
    )
    if foreign:
        raise _refusal(model, f"what follows the blocks depends on {_told(foreign[0])}, not only on the last block")
    both = sorted(behind & ahead)
    if both:
        raise _refusal(model, f"{both[0]} is used before the first block and after the last")
    if len(record.keys) != 1 or len(record.shapes) != 1:
        raise _refusal(model, "its blocks are not all called, or do not all answer, in the same way")
    if tied and tied not in dict(model.named_parameters()):
        raise _refusal(model, f"a module before {structure.embedding} and {structure.head} shares their weight")
    before_modules, after_modules = _modules(model, structure, ahead, behind)
    num_outputs, output_index = record.shapes.pop()
    needed = {name: record.templates.get(name) for name in (structure.embedding, *before_modules)}
    return Chain(before_modules, after_modules, needed, record.keys.pop(), num_outputs, output_index)


def _is_parameter(model: nn.Module, name: str) -> bool:
    module, _, key = name.rpartition(".")
    try:
        return key in model.get_submodule(module)._parameters
    except AttributeError:
        return False


def _told(name: str) -> str:
    return {"embedding": "the embedding"}.get(name, name)


def _modules(
    model: nn.Module, structure: Structure, ahead: set[str], behind: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every module outside of the blocks that has parameters of its own: needed before the blocks or after.

    One that the pass does not reach (a vision tower, a head of another task) stays with the first stage.
    """
    ends = tuple(f"{name}." for name in (structure.blocks, structure.embedding, structure.head))
    before: list[str] = []
    after: list[str] = []
    for name, module in model.named_modules():
        own = {f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)}
        if not own or f"{name}.".startswith(ends):
            continue
        if structure.blocks.startswith(f"{name}.") or not name:
            raise _refusal(model, f"{sorted(own)[0]} is a parameter beside the blocks and not of a module")
        if own & behind and own & ahead:
            raise _refusal(model, f"{name} is used before the first block and after the last")
        (after if own & behind else before).append(name)
    return tuple(before), tuple(after)


def _refusal(model: nn.Module, rule: str) -> PlanError:
    return PlanError(f"strategy.pp above 1 for {type(model).__name__}", rule, "Use pp=1")
