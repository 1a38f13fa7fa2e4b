"""Proof that a model is a chain of blocks, which is what a pipeline can cut.

The model's own ``forward`` runs once on fake tensors: shapes and autograd, no memory and no numbers. The
output of the embedding and of each block is replaced by a fresh leaf, so that autograd's graph tells what
each part depends on, by whatever way it got there. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.errors import PlanError
from shardwise.models.calling import call_model
from shardwise.models.structure import Structure

_ROWS, _LENGTH = 2, 4


@dataclass(frozen=True)
class Chain:
    """What stands around the blocks, by module name, and how a block is called and answers.

    Args:
        before: modules with parameters that only the first stage needs, the token embedding left out.
        after: modules with parameters that only the last stage needs, the head left out.
        input_key: the place or the name of the hidden state among a block's arguments.
        num_outputs: 0 where a block returns its hidden state, else the length of the tuple that it returns.
        output_index: place of the hidden state in that tuple.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    input_key: int | str = 0
    num_outputs: int = 0
    output_index: int = 0


@dataclass
class _Record:
    """What happened in the pass, in its order."""

    order: list[int] = field(default_factory=list)
    keys: set[int | str] = field(default_factory=set)
    shapes: set[tuple[int, int]] = field(default_factory=set)  # (length of the output, place of the state)
    leaves: dict[int, str] = field(default_factory=dict)  # identity -> parameter, "embedding" or "block 3"
    last: torch.Tensor | None = None
    reached: dict[int, set[str]] = field(default_factory=dict)  # block -> leaves that its output depends on
    before: set[str] = field(default_factory=set)
    kept: list[torch.Tensor] = field(default_factory=list)  # alive, so that identities stay their own


class _NotAChain(Exception):
    """Raised inside of the traced pass; its text is the rule that is broken."""


def find_chain(model: nn.Module, structure: Structure) -> Chain:
    """Run ``model`` (on meta) on fake tensors and check that it can be cut between any two blocks.

    Raises:
        PlanError: a block that runs more than once or out of order, that depends on more of the earlier
            blocks or of the embedding than its hidden state, or a head that does.
    """
    blocks = list(model.get_submodule(structure.blocks).children())
    record = _Record()
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.enter_context(_hooked(block, *_block_hooks(record, index)))
        embedding = model.get_submodule(structure.embedding)
        stack.enter_context(_hooked(embedding, None, lambda _m, _a, out: _leaf(record, out, "embedding")))
        stack.enter_context(_traceable_experts(model))
        try:
            logits = _fake_forward(model, record)
        except _NotAChain as error:
            raise _refusal(model, str(error)) from None
        except Exception as error:  # whatever the architecture does: it cannot be shown to be a chain
            raise _refusal(model, f"its forward cannot be traced ({type(error).__name__}: {error})") from error
    if record.order != list(range(len(blocks))):
        raise _refusal(model, f"its {len(blocks)} blocks do not run once each, in order (they run as {record.order})")
    return _chain(model, structure, record, _reached(record, logits))


def _fake_forward(model: nn.Module, record: _Record) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        state = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fake = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
            state[name] = fake.requires_grad_(isinstance(tensor, nn.Parameter) and tensor.is_floating_point())
            record.leaves[id(state[name])] = name
            record.kept.append(state[name])
        positions = torch.arange(_LENGTH).expand(_ROWS, _LENGTH)
        wrapped = _Called(model)
        state = {f"model.{name}": tensor for name, tensor in state.items()}
        logits: torch.Tensor = torch.func.functional_call(wrapped, state, (torch.zeros_like(positions), positions))
        return logits


class _Called(nn.Module):
    """A model that is called with ids and positions and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return call_model(self.model, input_ids, position_ids)


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
def _traceable_experts(model: nn.Module) -> Iterator[None]:
    """The default loop over experts asks for numbers, which fake tensors do not have."""
    saved = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if saved is None or saved == "batched_mm":
        yield
        return
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(saved)  # type: ignore[operator]


def _leaf(record: _Record, tensor: torch.Tensor, name: str) -> torch.Tensor:
    leaf = tensor.detach().requires_grad_()
    record.leaves[id(leaf)] = name
    record.kept.append(leaf)
    return leaf.clone()  # the model may change it in place, which a leaf does not allow


def _block_hooks(record: _Record, index: int) -> tuple[Any, Any]:
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        record.order.append(index)
        if record.order != list(range(index + 1)):
            raise _NotAChain(f"its blocks do not run once each, in order (they run as {record.order} ...)")
        if index == 0:
            key = next((k for k, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad), None)
        else:
            key = next((k for k, v in given.items() if v is record.last), None)
        if key is None:
            raise _NotAChain(
                f"block {index} does not receive what {f'block {index - 1}' if index else 'the embedding'} returns"
            )
        record.keys.add(key)
        if index:
            return None
        record.before = _reached(record, given[key])
        given[key] = _leaf(record, given[key], "input of block 0")
        return tuple(given[place] for place in range(len(args))), {k: v for k, v in given.items() if isinstance(k, str)}

    def after(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        place, length = 0, 0
        if isinstance(out, tuple | list):
            length = len(out)
            place = next((i for i, item in enumerate(out) if isinstance(item, torch.Tensor) and item.dim() == 3), 0)
        state = out[place] if length else out
        if not isinstance(state, torch.Tensor):
            raise _NotAChain(f"block {index} returns no tensor but a {type(out).__name__}")
        record.shapes.add((length, place))
        record.reached[index] = _reached(record, state)
        record.last = _leaf(record, state, f"block {index}")
        return (*out[:place], record.last, *out[place + 1 :]) if length else record.last

    return before, after


def _reached(record: _Record, tensor: torch.Tensor) -> set[str]:
    """Names of the leaves that ``tensor`` was computed from."""
    leaves, seen, waiting = set(), set(), [tensor.grad_fn]
    if tensor.grad_fn is None and id(tensor) in record.leaves:
        return {record.leaves[id(tensor)]}
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(record.leaves.get(id(node.variable), "a tensor of its own"))
        waiting.extend(parent for parent, _ in node.next_functions)
    return leaves


def _chain(model: nn.Module, structure: Structure, record: _Record, after: set[str]) -> Chain:
    last = structure.num_blocks - 1
    for index, reached in record.reached.items():
        allowed = f"block {index - 1}" if index else "input of block 0"
        inside = f"{structure.blocks}.{index}."
        for name in sorted(reached - {allowed}):
            if not name.startswith(inside):
                rule = f"block {index} depends on {_told(name)} by another way than its hidden state"
                raise _refusal(model, rule)
    tied = f"{structure.embedding}.weight" if structure.tied else ""
    behind, ahead = after - {f"block {last}", tied}, record.before - {"embedding"}
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
    before_modules, after_modules = _modules(model, structure, ahead, behind)
    num_outputs, output_index = record.shapes.pop()
    return Chain(before_modules, after_modules, record.keys.pop(), num_outputs, output_index)


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
