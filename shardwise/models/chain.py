"""Proof that a model is a chain of blocks, which is what a pipeline can cut.

The model's own ``forward`` runs once on fake tensors: shapes and autograd, no memory and no numbers. The
output of the embedding and of each block is replaced by a fresh leaf, so that autograd's graph tells what
each part depends on. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.structure import Structure

_ROWS, _LENGTH = 2, 4


@dataclass(frozen=True)
class Chain:
    """What stands around the blocks, by module name, and what a block returns.

    Args:
        before: modules with parameters that run before the first block, the token embedding left out.
        after: modules with parameters that run after the last block, the head left out.
        num_outputs: 0 where a block returns its hidden state, else the length of the tuple that begins with it.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    num_outputs: int


@dataclass
class _Record:
    """What happened in the pass: module names and block numbers in their order."""

    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    extra: list[list[torch.Tensor]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    num_outputs: set[int] = field(default_factory=set)
    calls: dict[str, set[int]] = field(default_factory=dict)
    embedded: list[torch.Tensor] = field(default_factory=list)


def find_chain(model: PreTrainedModel, structure: Structure) -> Chain:
    """Run ``model`` (on meta) on fake tensors and check that it can be cut between any two blocks.

    Raises:
        PlanError: a block that runs more than once or out of order, that receives more of the earlier
            blocks or of the embedding than its hidden state, or a head that does.
    """
    blocks = model.get_submodule(structure.blocks)
    ends = tuple(f"{name}." for name in (structure.blocks, structure.embedding, structure.head))
    outside = [
        name
        for name, module in model.named_modules()
        if not f"{name}.".startswith(ends) and next(module.parameters(recurse=False), None) is not None
    ]
    record = _Record(calls={name: set() for name in outside})
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.enter_context(_hooked(block, *_block_hooks(record, index)))
        for name in outside:
            stack.enter_context(_hooked(model.get_submodule(name), *_outside_hooks(record, name)))
        embedding = model.get_submodule(structure.embedding)
        stack.enter_context(_hooked(embedding, None, lambda _m, _a, out: _keep(record.embedded, out)))
        stack.enter_context(_traceable_experts(model))
        try:
            logits = _fake_forward(model)
        except Exception as error:  # whatever the architecture does: it cannot be shown to be a chain
            raise _refusal(model, f"its forward cannot be traced ({type(error).__name__}: {error})") from error
    _check_blocks(model, record, len(blocks))
    foreign = _reached(logits) & {id(t) for t in (*record.embedded, *record.outputs[:-1])}
    if foreign:
        raise _refusal(model, "what follows the blocks reads more than the last block's hidden state")
    return _chain(model, structure, record)


def _fake_forward(model: PreTrainedModel) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        state = {
            name: FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu")).requires_grad_(
                isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            )
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        positions = torch.arange(_LENGTH).expand(_ROWS, _LENGTH)
        inputs = {"input_ids": torch.zeros_like(positions), "position_ids": positions, "use_cache": False}
        logits: torch.Tensor = torch.func.functional_call(model, state, kwargs=inputs).logits
        return logits


@contextmanager
def _hooked(module: nn.Module, before: Any, after: Any) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(before, with_kwargs=True)] if before else []
    handles += [module.register_forward_hook(after)] if after else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _traceable_experts(model: PreTrainedModel) -> Iterator[None]:
    """The default loop over experts asks for numbers, which fake tensors do not have."""
    saved = getattr(model.config, "_experts_implementation", None)
    if saved is None or saved == "batched_mm":
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(saved)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def _keep(kept: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    kept.append(_leaf(out))
    return kept[-1]


def _block_hooks(record: _Record, index: int) -> tuple[Any, Any]:
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        record.order.append(index)
        record.inputs.append(hidden)
        others = [*args[1:], *(value for value in kwargs.values() if value is not hidden)]
        record.extra.append([t for value in others for t in _tensors(value)])

    def after(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        if isinstance(out, tuple):
            record.num_outputs.add(len(out))
            return (_keep(record.outputs, out[0]), *out[1:])
        record.num_outputs.add(0)
        return _keep(record.outputs, out)

    return before, after


def _outside_hooks(record: _Record, name: str) -> tuple[Any, Any]:
    def before(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        record.calls[name].add(len(record.order))

    return before, None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def _check_blocks(model: PreTrainedModel, record: _Record, num_blocks: int) -> None:
    if record.order != list(range(num_blocks)):
        raise _refusal(model, f"its {num_blocks} blocks do not run once each, in order (they run as {record.order})")
    for index in range(num_blocks):
        if index and record.inputs[index] is not record.outputs[index - 1]:
            raise _refusal(model, f"block {index} does not receive what block {index - 1} returns")
        if any(tensor.requires_grad for tensor in record.extra[index]):
            raise _refusal(model, f"block {index} receives more of the embedding or of earlier blocks than one tensor")
    if len(record.num_outputs) != 1:
        raise _refusal(model, "its blocks do not all return the same number of values")


def _reached(tensor: torch.Tensor) -> set[int]:
    """Identities of the leaves that ``tensor`` was computed from."""
    leaves, seen, waiting = set(), set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return leaves


def _chain(model: PreTrainedModel, structure: Structure, record: _Record) -> Chain:
    before, after = [], []
    for name, calls in record.calls.items():
        if calls == {0}:
            before.append(name)
        elif calls == {structure.num_blocks}:
            after.append(name)
        else:
            raise _refusal(model, f"{name} has weights and runs neither before the first block nor after the last")
    return Chain(tuple(before), tuple(after), record.num_outputs.pop())


def _refusal(model: PreTrainedModel, rule: str) -> PlanError:
    return PlanError(f"strategy.pp above 1 for {type(model).__name__}", rule, "Use pp=1")
