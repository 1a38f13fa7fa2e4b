"""Proof that a model is a chain of blocks, which is what a pipeline can cut, and what crosses each border.

The model's own ``forward`` runs once on fake tensors: shapes and autograd, no memory and no numbers. What each
part depends on is told by autograd's graph, see :mod:`shardwise.models.flow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.flow import RETURNED, Place, Recorder, Shape, template_of
from shardwise.models.origins import Origins
from shardwise.models.shrink import build_small, shrink
from shardwise.models.structure import Structure, find_structure, text_config
from shardwise.models.trace import SIZES, fake_forward, hooked, real_forward

Forward = Callable[[nn.Module, tuple[int, int], Origins], tuple[torch.Tensor, dict[str, torch.Tensor]]]

# A second pass of other sizes: what depends on them in another way than by being one of them then shows.
_OTHER_SIZES = (5, 17)


@dataclass(frozen=True)
class Value:
    """A tensor that one part of a model makes and a later one reads.

    Args:
        module: the part: a block, or a module that runs before the blocks.
        place: where the tensor lies in what the part returns, or writes into its arguments.
        shape: its shape in the whole model.
        first: the first border that it crosses; border k lies before block k.
        last: the last one.
        call: how often the part has run before in the pass.
        changed: whether the model changes it in place later, so that it must cross as the part returned it.
        parameters: names of those that it depends on; None: not known, it may be any.
    """

    module: str
    place: Place
    shape: Shape
    first: int
    last: int
    call: int = 0
    changed: bool = field(default=False, compare=False)
    parameters: frozenset[str] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Chain:
    """What stands around the blocks, by module name, how a block is called and answers, and what flows.

    Args:
        before: modules with parameters that only the first stage needs, the token embedding left out.
        after: modules with parameters that only the last stage needs, the head left out.
        templates: what modules outside of the blocks, and blocks, return; see :func:`template_of`.
        input_key: the place or the name of the hidden state among a block's arguments.
        num_outputs: 0 where a block returns its hidden state, else the length of the tuple that it returns.
        output_index: place of the hidden state in that tuple.
        own_before: parameters of modules around the blocks that only the first stage needs.
        own_after: the same of the last stage.
        written: block -> (argument, entry) -> the form of what it writes there.
        hidden: block -> its hidden state; a block that does not run has none.
        further: all other values that are read behind a border.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    templates: dict[str, Any] = field(default_factory=dict)
    input_key: int | str = 0
    num_outputs: int = 0
    output_index: int = 0
    own_before: tuple[str, ...] = ()
    own_after: tuple[str, ...] = ()
    written: dict[str, dict[tuple[Any, Any], Any]] = field(default_factory=dict)
    hidden: dict[int, Value] = field(default_factory=dict)
    further: tuple[Value, ...] = ()

    def border(self, block: int) -> tuple[Value, ...]:
        """What crosses the border before ``block``, the hidden state first; nothing before the first block."""
        ran = [index for index in self.hidden if index < block]
        if not ran:
            return ()
        state = self.hidden[max(ran)]
        others = [*self.further, *(value for index, value in self.hidden.items() if index != max(ran))]
        return (state, *(value for value in others if value.first <= block <= value.last))

    def runs(self, block: int) -> bool:
        """Whether ``block`` runs in a pass over token ids (cross attention to an image does not)."""
        return block in self.hidden


def find_chain(model: nn.Module, structure: Structure) -> Chain:
    """Run ``model`` (on meta) on fake tensors and check that it can be cut between any two blocks.

    A model that asks for numbers in its forward is checked on a small copy of it with real ones.

    Raises:
        PlanError: a block that runs more than once or out of order, that uses a weight of another block or of a module
            outside of the blocks, or something that flows between blocks and cannot be handed over.
    """
    try:
        return _proven(model, structure, fake_forward)
    except Untraceable as error:
        if not isinstance(model, PreTrainedModel):
            raise error.refusal from None
    small = build_small(shrink(model.config), torch.float32)
    try:
        chain = _proven(small, find_structure(small), real_forward)
    except Untraceable as error:
        raise error.refusal from None
    return _of_whole(model, structure, small, chain)


class Untraceable(Exception):
    """The forward cannot be run in this way."""

    def __init__(self, refusal: PlanError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def _proven(model: nn.Module, structure: Structure, forward: Forward) -> Chain:
    chain = _found(model, structure, forward, SIZES)
    states = {value.shape.sizes[:2] == ("rows", "length") for value in chain.hidden.values()}
    if chain.further or states != {True}:
        other = _found(model, structure, forward, _OTHER_SIZES)
        if (other.hidden, other.further) != (chain.hidden, chain.further):
            raise _refusal(model, "the shapes of what flows between its blocks depend on more than rows and length")
    return chain


def _found(model: nn.Module, structure: Structure, forward: Forward, sizes: tuple[int, int]) -> Chain:
    record, logits, state = record_pass(model, structure, forward, sizes)
    if any(later <= earlier for earlier, later in zip(record.order, record.order[1:], strict=False)):
        raise _refusal(model, _order_rule(record.order, structure.num_blocks))
    behind = record.finish(logits)
    if record.broken is not None:
        raise _refusal(model, record.broken)
    return _chain(model, structure, record, {id(tensor): name for name, tensor in state.items()}, behind)


def record_pass(
    model: nn.Module, structure: Structure, forward: Forward, sizes: tuple[int, int]
) -> tuple[Recorder, torch.Tensor, dict[str, torch.Tensor]]:
    """One pass with a recorder on all parts: the record, the logits, and what ``forward`` tells of the parameters.

    Raises:
        Untraceable: the forward fails.
    """
    blocks = list(model.get_submodule(structure.blocks).children())
    record = Recorder([f"{structure.blocks}.{index}" for index in range(len(blocks))], sizes)
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            stack.enter_context(hooked(block, *record.block_hooks(index)))
        for name, module in model.named_modules():
            if (
                name
                and not f"{name}.".startswith(f"{structure.blocks}.")
                and not structure.blocks.startswith(f"{name}.")
            ):
                is_part = name == structure.embedding or any(True for _ in module.parameters(recurse=False))
                stack.enter_context(hooked(module, None, record.part_hook(name, is_part=is_part)))
        try:
            logits, state = forward(model, sizes, record.origins)
        except Exception as error:  # whatever the architecture does: it cannot be shown to be a chain
            rule = f"its forward cannot be traced ({type(error).__name__}: {error})"
            raise Untraceable(_refusal(model, rule)) from error
    return record, logits, state


def _order_rule(order: list[int], num_blocks: int) -> str:
    counts = [order.count(index) for index in range(num_blocks)]
    often = next((index for index, count in enumerate(counts) if count > 1), None)
    if often is not None:
        return f"its {num_blocks} blocks do not run once each, in order (block {often} runs {counts[often]} times)"
    return f"its {num_blocks} blocks do not run once each, in order (they run as {order})"


def _chain(
    model: nn.Module, structure: Structure, record: Recorder, names: dict[int, str], reached_behind: set[int]
) -> Chain:
    def named(leaves: Iterable[int]) -> set[str]:
        return {names.get(leaf, "a tensor of its own") for leaf in leaves}

    if not record.order or record.order[0] != 0:
        raise _refusal(model, _order_rule(record.order, structure.num_blocks))
    if len(record.keys) != 1 or len(record.forms) != 1:
        raise _refusal(model, "its blocks are not all called, or do not all answer, in the same way")
    parameters = [named(leaves) for leaves in record.parameters()]
    own_leaves = {index: named(leaves) for index, leaves in record.leaves.items()}
    _check_blocks(model, structure, own_leaves)
    read_early = [number for number, value in enumerate(record.values) if value.border == 0 and value.last >= 0]
    ahead = own_leaves[0].union(*(parameters[number] for number in read_early))
    ahead = {name for name in ahead if not name.startswith((f"{structure.blocks}.0.", f"{structure.embedding}."))}
    behind = named(reached_behind)
    if structure.tied:
        behind -= {f"{structure.embedding}.weight"}
    _check_ends(model, structure, ahead, behind)
    modules, own = _modules(model, structure, ahead, behind)
    hidden, further = _values(model, structure, record, parameters)
    num_outputs, output_index = record.forms.pop()
    needed = {name: record.templates.get(name) for name in (structure.embedding, *modules[0], *record.names)}
    return Chain(*modules, needed, record.keys.pop(), num_outputs, output_index, *own, record.written, hidden, further)


def _check_blocks(model: nn.Module, structure: Structure, leaves: dict[int, set[str]]) -> None:
    """A block uses its own weights; the first one also what runs before it, which is of the same stage."""
    for index, names in leaves.items():
        for name in sorted(names):
            own = name.startswith(f"{structure.blocks}.{index}.")
            if not own and (index > 0 or name.startswith(f"{structure.blocks}.")):
                raise _refusal(model, f"block {index} uses {name}, which is not its own")


def _check_ends(model: nn.Module, structure: Structure, ahead: set[str], behind: set[str]) -> None:
    """What is used before the blocks and what is used after them are different parameters, and none of a block."""
    if structure.tied and f"{structure.embedding}.weight" not in dict(model.named_parameters()):
        raise _refusal(model, f"a module before {structure.embedding} and {structure.head} shares their weight")
    for name in sorted(ahead | behind):
        where = "precedes" if name in ahead else "follows"
        if not _is_parameter(model, name) or name.startswith(f"{structure.blocks}."):
            raise _refusal(model, f"what {where} the blocks depends on {name}")
    both = sorted(behind & ahead)
    if both:
        raise _refusal(model, f"{both[0]} is used before the first block and after the last")


def _values(
    model: nn.Module, structure: Structure, record: Recorder, parameters: list[set[str]]
) -> tuple[dict[int, Value], tuple[Value, ...]]:
    """The hidden states by block, and all other values that cross a border."""
    hidden: dict[int, Value] = {}
    further = []
    blocks = {number: block for block, number in record.hidden.items()}
    for number, made in enumerate(record.values):
        last = min(made.last, structure.num_blocks - 1)
        is_last = number in blocks and made.border == structure.num_blocks  # no border lies behind it
        if max(made.border, 1) > last and not is_last:
            continue
        shape = template_of(made.tensor, record.sizes)
        names = frozenset(parameters[number])
        changed = made.tensor._version > 0
        value = Value(made.module, made.place, shape, max(made.border, 1), last, made.call, changed, names)
        if number in blocks:
            hidden[blocks[number]] = value
        else:
            further.append(value)
        if changed and not made.tensor.requires_grad:  # of such changes nothing tells what they read
            raise _refusal(model, f"{value.module} returns what later blocks read, and it is changed in place")
        if last > record.changed_inside.get(number, last):  # another stage does not run that block: nor its change
            rule = f"{structure.blocks}.{record.changed_inside[number]} changes in place what {made.module} returns"
            raise _refusal(model, f"{rule}, and later blocks or the head read it")
        if made.module in record.uneven:
            raise _refusal(model, f"later blocks read what {made.module} returns, which has several shapes")
    return hidden, tuple(further)


def _is_parameter(model: nn.Module, name: str) -> bool:
    module, _, key = name.rpartition(".")
    try:
        return key in model.get_submodule(module)._parameters
    except AttributeError:
        return False


def _modules(
    model: nn.Module, structure: Structure, ahead: set[str], behind: set[str]
) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], tuple[tuple[str, ...], tuple[str, ...]]]:
    """What has parameters outside of the blocks, needed before them or after: modules, and parameters beside them.

    What the pass does not reach (a vision tower, a head of another task) stays with the first stage.
    """
    ends = tuple(f"{name}." for name in (structure.blocks, structure.embedding, structure.head))
    modules: tuple[list[str], list[str]] = ([], [])
    own: tuple[list[str], list[str]] = ([], [])
    for name, module in model.named_modules():
        found = [f"{name}.{key}" if name else key for key, _ in module.named_parameters(recurse=False)]
        if not found or f"{name}.".startswith(ends):
            continue
        if structure.blocks.startswith(f"{name}.") or not name:
            for parameter in found:
                own[parameter in behind].append(parameter)
            continue
        is_after = bool(behind.intersection(found))
        if is_after and ahead.intersection(found):
            raise _refusal(model, f"{name} is used before the first block and after the last")
        modules[is_after].append(name)
    return (tuple(modules[0]), tuple(modules[1])), (tuple(own[0]), tuple(own[1]))


def _of_whole(model: PreTrainedModel, structure: Structure, small: PreTrainedModel, chain: Chain) -> Chain:
    """The chain of ``model`` from that of its small copy, of which numbers of blocks and widths are its own."""
    width = text_config(small).hidden_size
    plain = ("rows", "length", width)
    if chain.further or any(v.shape.sizes != plain or v.first < v.last for v in chain.hidden.values()):
        raise _refusal(model, "its forward asks for numbers, and more than one hidden state flows between its blocks")
    shape = Shape(("rows", "length", text_config(model).hidden_size), model.dtype)
    place = (RETURNED, chain.output_index) if chain.num_outputs else (RETURNED,)
    changed = any(value.changed for value in chain.hidden.values())
    hidden = {
        index: Value(f"{structure.blocks}.{index}", place, shape, index + 1, index + 1, changed=changed)
        for index in range(structure.num_blocks)
    }
    templates = dict(chain.templates)
    for index in range(structure.num_blocks):
        templates[f"{structure.blocks}.{index}"] = (None,) * chain.num_outputs or None
    return replace(chain, templates=templates, written={}, hidden=hidden)


def _refusal(model: nn.Module, rule: str) -> PlanError:
    return PlanError(f"strategy.pp above 1 for {type(model).__name__}", rule, "Use pp=1")
