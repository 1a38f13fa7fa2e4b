"""One pass through a model to see what its modules do: on fake tensors, without memory and numbers.

The model may be on meta. Where it asks for numbers in its forward (routers do), a small copy with real ones serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.models.calling import call_model, leaving_no_state

# Unlike any size of a model, so that a shape tells which of its dims are the rows and the length.
SIZES = (11, 13)


class _Called(nn.Module):
    """A model that is called with ids and positions and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return call_model(self.model, input_ids, position_ids)


def fake_forward(
    model: nn.Module, sizes: tuple[int, int] = SIZES, within: AbstractContextManager[Any] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of ``model`` on fake tensors, and the fake leaves that stood for its parameters and buffers.

    ``sizes`` are the rows and the length of the pass, which runs inside ``within``. Hooks of the modules run.
    Whatever the model raises is passed on.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), experts_as(model, "batched_mm"):
        state = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fake = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
            state[name] = fake.requires_grad_(isinstance(tensor, nn.Parameter) and tensor.is_floating_point())
        given = {f"model.{name}": tensor for name, tensor in state.items()}
        with within or nullcontext(), leaving_no_state(model):
            logits: torch.Tensor = torch.func.functional_call(_Called(model), given, _inputs(sizes))
    return logits, state


def real_forward(
    model: nn.Module, sizes: tuple[int, int] = SIZES, within: AbstractContextManager[Any] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same with the numbers of ``model``, which is on the CPU."""
    with torch.enable_grad(), within or nullcontext(), leaving_no_state(model):
        return call_model(model, *_inputs(sizes)), dict(model.named_parameters())


def _inputs(sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length = sizes
    positions = torch.arange(length).expand(rows, length)
    return torch.zeros_like(positions), positions


def called_modules(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Which of the modules ``names`` run in a pass over token ids alone (a vision tower does not)."""
    called: set[str] = set()
    wanted = set(names)

    def note(name: str) -> None:
        called.add(name)
        if called == wanted:
            raise _Known

    with ExitStack() as stack:
        for name in sorted(wanted):
            stack.enter_context(hooked(model.get_submodule(name), lambda *_, name=name: note(name), None))
        with suppress(_Known):
            fake_forward(model)
    return called


class _Known(Exception):
    """Ends a pass of which nothing more is to be seen."""


@contextmanager
def hooked(module: nn.Module, before: Any, after: Any) -> Iterator[None]:
    """A forward pre-hook and a forward hook, both with keyword arguments, taken away again."""
    handles = [module.register_forward_pre_hook(before, with_kwargs=True)] if before else []
    handles += [module.register_forward_hook(after, with_kwargs=True)] if after else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def experts_as(model: nn.Module, implementation: str) -> Iterator[None]:
    """Run the experts of ``model``, if it has any, by another implementation of transformers.

    The default loop over experts asks for numbers, which fake tensors do not have.
    """
    saved = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if saved is None or saved == implementation:
        yield
        return
    model.set_experts_implementation(implementation)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_experts_implementation(saved)  # type: ignore[operator]
