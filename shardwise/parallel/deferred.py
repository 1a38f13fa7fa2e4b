"""The backward pass in two halves: gradients of inputs at once, gradients of linear layers' weights later.

Under the schedule ``zero_bubble`` a stage sends the gradient of its input on as soon as it has it, and computes the
gradients of its weights where it would otherwise wait (Qi et al. 2023, arXiv:2401.10241). For y = x W^T + b

    gradient of x:  G W      needed by the layer before
    gradient of W:  G^T x    needed by nobody but the optimizer

so x and the gradient G of y are kept, and the product of them is put off. That holds for every product of an input
with a parameter as it lies in memory; all else (norms, biases, embeddings, stacks of experts, weights that are
transformed before they are used) has its gradient at once, in the first half, and so has the head, whose G is as large
as the logits. So it works with any model, and the graph of the forward pass is let go in the first half, as after a
whole backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

_Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # parameter, [tokens, in], gradient [tokens, out]


class DeferredWeights:
    """What the first halves of a stage's backward passes have left for the second ones.

    Args:
        settle: called after each second half; FSDP2 wants to know of new gradients.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._kept: list[_Kept] = []
        self._seen: set[int] = set()  # addresses of what the running first half has kept: products share inputs
        self._new_bytes = 0  # of it
        self.held_bytes = self.most_held_bytes = 0  # of all first halves whose second half has not run
        self.paused = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Products of the forward pass inside of it put off the gradients of their weights."""
        with _Products(self):
            yield

    def leave_out(self, module: nn.Module) -> None:
        """Gradients of what ``module`` computes do not wait."""
        module.register_forward_pre_hook(lambda *_: setattr(self, "paused", True))
        module.register_forward_hook(lambda *_: setattr(self, "paused", False), always_call=True)

    def keep(self, weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
        """Put off the gradient of ``weight``; neither tensor is copied."""
        self._kept.append((weight, x, grad))
        for tensor in (x, grad):
            if tensor.data_ptr() not in self._seen:
                self._seen.add(tensor.data_ptr())
                self._new_bytes += tensor.numel() * tensor.element_size()

    def take(self) -> Callable[[], None]:
        """The second half of the backward pass that has just run."""
        kept, self._kept = self._kept, []
        size, self._new_bytes = self._new_bytes, 0
        self._seen.clear()
        self.held_bytes += size
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

        def second_half() -> None:
            self.held_bytes -= size
            _add_gradients(kept)
            if self._settle is not None:
                self._settle()

        return second_half


def recording_again(
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
    deferred: DeferredWeights,
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    """For ``torch.utils.checkpoint``: a repetition saves the same tensors as the first pass, which was recorded."""

    @contextmanager
    def both(again: AbstractContextManager[Any]) -> Iterator[None]:
        with again, deferred.recording():
            yield

    def make() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, again = contexts()
        return first, both(again)

    return make


@torch.no_grad()
def _add_gradients(kept: list[_Kept]) -> None:
    """Add each weight's gradient to it as a backward pass does: once, so that its hooks see a whole one."""
    by_weight: dict[int, list[_Kept]] = {}
    while kept:
        one = kept.pop()
        by_weight.setdefault(id(one[0]), []).append(one)
    while by_weight:
        _, same = by_weight.popitem()
        weight, x, grad = same.pop()
        whole = grad.t() @ x
        for _, other_x, other_grad in same:
            whole.addmm_(other_grad.t(), other_x)
        torch.autograd.backward([weight], [whole])


class _Linear(torch.autograd.Function):
    """``F.linear`` whose backward pass leaves the gradient of the weight to ``deferred``.

    The weight comes in a tuple: of an input of its own autograd would tell hooks that its gradient is there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: tuple[torch.Tensor],
        bias: torch.Tensor | None,
        deferred: DeferredWeights,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        (weight,) = weights
        ctx.weight, ctx.deferred = weight, deferred
        rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        # No view of what nobody else holds: others may change it in place.
        return torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], weight.shape[0]))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        (x,), grad, weight = ctx.saved_tensors, grads[0], ctx.weight
        rows = grad.reshape(-1, grad.shape[-1])
        ctx.deferred.keep(weight, x.detach().reshape(-1, x.shape[-1]), rows)
        of_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return of_x, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Products(TorchFunctionMode):
    """Sends products with a parameter that trains through :class:`_Linear`."""

    def __init__(self, deferred: DeferredWeights) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled() and not self._deferred.paused:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if _can_wait(weight) and _is_followed(x, bias) and x.dtype == weight.dtype:
                return _Linear.apply(x, (weight,), bias, self._deferred)
        return func(*args, **kwargs)


def _linear_arguments(
    input: torch.Tensor,  # noqa: A002  the name that F.linear gives it
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return input, weight, bias


def _is_followed(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a backward pass comes by without the weight."""
    return not isinstance(x, DTensor) and (x.requires_grad or (bias is not None and bias.requires_grad))


def _can_wait(weight: torch.Tensor) -> bool:
    """A parameter as it lies in memory: the gradient of anything made of it must go on to where it was made."""
    return weight.is_leaf and weight.requires_grad and weight.dim() == 2 and not isinstance(weight, DTensor)
