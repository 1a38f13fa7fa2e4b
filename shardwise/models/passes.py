"""One pass through a model on fake tensors under the meter: a block of each kind, and what stands around the blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from shardwise.models.calling import call_model
from shardwise.models.meter import Meter, Tally, metered_block
from shardwise.models.standin import StandIn
from shardwise.models.structure import Structure
from shardwise.models.trace import experts_as

Tallies = dict[tuple[str, bool], Tally]


class _FusedAttention(TorchFunctionMode):
    """Attention without dropout, in a kernel that keeps no scores: what runs on accelerators.

    Where values are wider or narrower than keys (latent attention), the CPU has no such kernel; accelerators do.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args, kwargs["dropout_p"] = args[:4], 0.0
            query, key, value = args[:3] if len(args) >= 3 else (kwargs[name] for name in ("query", "key", "value"))
            masked = (args[3] if len(args) > 3 else kwargs.get("attn_mask")) is not None
            if value.shape[-1] != query.shape[-1] and query.shape[1] == key.shape[1] and not masked:
                causal, scale = kwargs.get("is_causal", False), kwargs.get("scale")
                kernel = torch.ops.aten._scaled_dot_product_efficient_attention
                return kernel(query, key, value, None, True, is_causal=causal, scale=scale)[0]
        return func(*args, **kwargs)


def thin(model: nn.Module, structure: Structure) -> nn.Module:
    """A copy of ``model`` with the first block of each kind alone; the others only let pass."""
    blocks: Any = model.get_submodule(structure.blocks)
    children = list(blocks.children())
    # The last block too: what joins a sequence that is cut stands behind it.
    kept = {structure.kinds.index(kind) for kind in structure.kinds} | {len(children) - 1}
    names = list(dict(blocks.named_children()))
    for index, name in enumerate(names):
        if index not in kept:
            blocks._modules[name] = StandIn(children[index])
    try:
        return copy.deepcopy(model)
    finally:
        for name, child in zip(names, children, strict=True):
            blocks._modules[name] = child


def part_of(kind: int) -> str:
    """The name of a kind of block among the tallies; beside them stand ``embedding`` and ``head``."""
    return f"block {kind}"


def metered_pass(
    model: nn.Module, structure: Structure, rows: int, length: int, prepare: Callable[[Meter], None] = lambda _: None
) -> Tallies:
    """Tallies of a pass over ``rows`` rows of ``length`` tokens, by part and direction.

    Args:
        model: on meta; its first block of each kind runs, the others let their hidden state pass.
        prepare: is given the meter before the pass.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.enable_grad(),
        # Experts in one product over tokens sorted by expert: the shapes of the loop.
        experts_as(model, "grouped_mm") if any(map(is_expert_stack, model.modules())) else nullcontext(),
        _FusedAttention(),
        ExitStack() as stack,
    ):
        state, names = _fake_state(model, mode)
        meter = Meter(names, rows)
        prepare(meter)
        _enter_blocks(stack, meter, model, structure)
        for module in model.modules():
            if is_expert_stack(module):
                stack.enter_context(_marked(meter, module))
        ids = torch.arange(length).expand(rows, length)
        stack.enter_context(meter)
        meter.part = "embedding"
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda tensor: tensor):
            call = _Called(model)
            loss = torch.func.functional_call(call, state, (torch.zeros_like(ids), ids))
        meter.backward = True
        loss.backward()
        meter.part = None
    return dict(meter.tallies)


class _Called(nn.Module):
    """A model with its loss, in the way of training: a sum over tokens in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits = call_model(self.model, input_ids, position_ids)
        scores = logits.flatten(0, -2)
        targets = torch.zeros(scores.shape[:1], dtype=torch.int64)
        return F.cross_entropy(scores.float(), targets, reduction="sum")


def _fake_state(model: nn.Module, mode: FakeTensorMode) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
    """Fake leaves by name, and their names by storage."""
    state: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if id(tensor) not in made:
            fake = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
            trains = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            made[id(tensor)] = fake.requires_grad_(trains)
        state[f"model.{name}"] = made[id(tensor)]
    return state, {int(t.untyped_storage()._cdata): name.removeprefix("model.") for name, t in state.items()}


def _enter_blocks(stack: ExitStack, meter: Meter, model: nn.Module, structure: Structure) -> None:
    """The first block of each kind is counted; what it returns tells how the others let pass."""
    blocks = list(model.get_submodule(structure.blocks).children())
    returned: dict[int, Any] = {}
    for index, (block, kind) in enumerate(zip(blocks, structure.kinds, strict=True)):
        first = structure.kinds.index(kind) == index

        def like(hidden: torch.Tensor, kind: int = kind) -> Any:
            out = returned[kind]
            return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

        stack.enter_context(metered_block(meter, block, part_of(kind) if first else None, like))
        # First of all hooks: what joins a cut sequence behind the last block belongs to the head.
        after = _after(meter, returned, kind, index == len(blocks) - 1)
        handle = block.register_forward_hook(after, prepend=True)
        stack.callback(handle.remove)
        before = block.register_forward_pre_hook(_before(meter, index == 0), with_kwargs=True, prepend=index > 0)
        stack.callback(before.remove)


def _before(meter: Meter, is_first: bool) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        meter.part = None
        if kwargs.get("attention_mask") is not None:  # on fake tensors it is always made; a kernel needs none
            kwargs = kwargs | {"attention_mask": None}
        return args, kwargs

    return hook


def _after(meter: Meter, returned: dict[int, Any], kind: int, is_last: bool) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, out: Any) -> None:
        returned.setdefault(kind, out)
        meter.part = "head" if is_last else None

    return hook


def is_expert_stack(module: nn.Module) -> bool:
    """Whether a module owns the matrices of several experts, stacked."""
    return not isinstance(module, nn.Conv1d) and any(p.dim() == 3 for p in module.parameters(recurse=False))


@contextmanager
def _marked(meter: Meter, module: nn.Module) -> Iterator[None]:
    """Know while a stack of experts runs."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        meter.in_experts = True
        try:
            return own(*args, **kwargs)
        finally:
            meter.in_experts = False

    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        module.forward = own  # type: ignore[method-assign]
