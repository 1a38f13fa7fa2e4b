"""What flows between the matrices of a block, found by running it.

One forward pass of a small copy, in float64 on the CPU. The result of every matrix product (a linear layer, a
stack of experts) and the input of every block is replaced by a fresh leaf, so that autograd knows what each
input of the next product was computed from: which leaves, and which elements of them. No architecture and no
operator is known by name; a dependency that is not there has a gradient of exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.models.calling import call_model, leaving_no_state

ROWS, LENGTH = 2, 8
_FIRST_ID, _LAST_ID = 5, 40  # of the tokens: no special ones, and in every small copy's vocabulary


@dataclass
class Product:
    """One matrix product of a block, a module that runs once in a pass.

    Args:
        name: of the module in the model.
        inputs: what it was given that gradients flow into; of a linear layer one tensor [rows, length, features].
        output: the leaf that stands for its result.
        args: what it was called with, as are ``kwargs``.
    """

    name: str
    module: nn.Module
    inputs: list[torch.Tensor]
    output: torch.Tensor
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_linear(self) -> bool:
        return is_linear(self.module)

    @property
    def in_features(self) -> int:
        return int(self.inputs[0].shape[-1])

    @property
    def out_features(self) -> int:
        return int(self.output.shape[-1])


@dataclass
class BlockTrace:
    """One block in the pass: what came in (a leaf), what went out, and the products between, in order.

    ``args`` and ``kwargs``: what it was called with, detached.
    """

    name: str
    module: nn.Module
    entry: torch.Tensor
    exit: torch.Tensor
    products: list[Product] = field(default_factory=list)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, block: nn.Module) -> torch.Tensor:
        """What ``block`` returns in the place of this one."""
        with leaving_no_state(block):
            out = block(*detached(self.args), **detached(self.kwargs))
        result: torch.Tensor = out[0] if isinstance(out, tuple | list) else out
        return result


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product with a bias: torch's linear layer or that of GPT-2."""
    return isinstance(module, nn.Linear | Conv1D)


def is_expert_stack(module: nn.Module) -> bool:
    """Whether a module owns the matrices of several experts, stacked: parameters with three dims."""
    # A convolution over the sequence has three dims too, and one of its own: it works on each channel.
    return not isinstance(module, nn.Conv1d) and any(p.dim() == 3 for p in module.parameters(recurse=False))


def trace_blocks(model: nn.Module, blocks: str) -> list[BlockTrace]:
    """Run ``model``, real and small, once, and note what its blocks do.

    Args:
        blocks: name of the list of blocks.
    """
    listed = model.get_submodule(blocks)
    traces: dict[int, BlockTrace] = {}
    counts = _count_calls(model, listed)
    with ExitStack() as stack:
        for index, block in enumerate(listed):
            stack.enter_context(_hooked(block, *_block_hooks(traces, index, f"{blocks}.{index}", block)))
            for name, module in block.named_modules(prefix=f"{blocks}.{index}"):
                if counts.get(name) == 1 and (is_expert_stack(module) or _acts_linearly(module)):
                    stack.enter_context(_hooked(module, *_product_hooks(traces, index, name, module)))
        run(model)
    return [traces[index] for index in sorted(traces)]


def run(model: nn.Module, length: int = LENGTH) -> torch.Tensor:
    """The logits of one pass over fixed tokens, as the blocks run in training."""
    ids = torch.randint(_FIRST_ID, _LAST_ID, (ROWS, length), generator=torch.Generator().manual_seed(0))
    with leaving_no_state(model):
        return call_model(model, ids, torch.arange(length).expand(ROWS, length))


def _acts_linearly(module: nn.Module) -> bool:
    """Whether a linear layer computes what its class promises (a subclass may scale or normalise)."""
    if not is_linear(module):
        return False
    if type(module) in (nn.Linear, Conv1D):
        return True
    weight, bias = linear_weight(module), module.bias
    x = torch.randn(3, weight.shape[1], dtype=weight.dtype, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            return torch.allclose(module(x), F.linear(x, weight, bias))
        except Exception:  # a forward that wants more than one input
            return False


def linear_weight(module: nn.Module) -> torch.Tensor:
    """[out, in] of a linear layer; that of GPT-2 is stored the other way round."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if isinstance(module, Conv1D) else weight


def _count_calls(model: nn.Module, blocks: Any) -> dict[str, int]:
    """How often each module inside of the blocks runs in a pass."""
    counts: dict[str, int] = {}
    inside = {id(m) for block in blocks for m in block.modules()}
    names = {name: module for name, module in model.named_modules() if id(module) in inside}

    def count(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    handles = [module.register_forward_pre_hook(count(name)) for name, module in names.items()]
    try:
        with torch.no_grad():
            run(model)
    finally:
        for handle in handles:
            handle.remove()
    return counts


@contextmanager
def _hooked(module: nn.Module, before: Any, after: Any) -> Iterator[None]:
    handles: list[Any] = [module.register_forward_hook(after, with_kwargs=True)]
    handles += [module.register_forward_pre_hook(before, with_kwargs=True)] if before else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _block_hooks(traces: dict[int, BlockTrace], index: int, name: str, block: nn.Module) -> tuple[Any, Any]:
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        leaf = _leaf(hidden)
        traces[index] = BlockTrace(name, block, leaf, leaf, args=detached(args), kwargs=detached(kwargs))
        given = leaf.clone()
        return ((given, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": given})

    def after(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], out: Any) -> None:
        traces[index].exit = out[0] if isinstance(out, tuple | list) else out

    return before, after


def _product_hooks(traces: dict[int, BlockTrace], index: int, name: str, module: nn.Module) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(len(name))

    def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not inputs or not isinstance(out, torch.Tensor):
            return out
        # Values of both signs at every feature: behind a rectifier none is cut off at all positions.
        leaf = _leaf(torch.randn(out.shape, dtype=out.dtype, generator=generator))
        traces[index].products.append(Product(name, module, inputs, leaf, args, kwargs))
        return leaf.clone()  # what follows may change it in place, which a leaf does not allow

    return None, after


def detached(value: Any) -> Any:
    """``value`` with new containers, and its tensors without their history: what one call changes no other sees."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(detached(item) for item in value)
    return value


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def supports(
    output: torch.Tensor, ranges: Sequence[tuple[int, int]], sources: Sequence[torch.Tensor]
) -> list[list[torch.Tensor | None]]:
    """For each range of the last dim of ``output``: which elements of each source it depends on.

    Returns:
        For each range and source a bool tensor of the source's shape, or None where it does not depend on it.
    """
    generator = torch.Generator().manual_seed(1)
    weight = torch.rand(output.shape, generator=generator, dtype=output.dtype) + 0.5
    found: list[list[torch.Tensor | None]] = []
    for start, stop in ranges:
        chosen = torch.zeros_like(weight)
        chosen[..., start:stop] = weight[..., start:stop]
        if not output.requires_grad:
            found.append([None] * len(sources))
            continue
        grads = torch.autograd.grad(output, list(sources), chosen, retain_graph=True, allow_unused=True)
        found.append([None if g is None or not bool(g.ne(0).any()) else g.ne(0) for g in grads])
    return found
