"""One process: transformers' own model, row after row without padding, torch's loss, clipping and optimizer."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.check.exact import Exact, Rounding
from shardwise.check.small import SmallModel, build_whole, state_of
from shardwise.data.rows import Row
from shardwise.errors import PlanError
from shardwise.models.lora import plain_name
from shardwise.spec.decay import decays
from shardwise.spec.run import TrainConfig

LEARNING_RATE = 1e-2  # large enough that a step's mistake shows in the next one's loss


@dataclass
class Reference:
    """What one process computes; tensors on the CPU.

    Args:
        dtype: in which it was computed.
        exact: whether no value was rounded below float64.
        state: parameters before the first step.
        losses, norms: of each step; norms before clipping.
        gradients: of the first step, of all that trains, by parameter name.
        outputs: of the first step, module -> for each row its output [1, length, ...]; in the order in which modules
            return.
    """

    dtype: torch.dtype
    exact: bool
    state: dict[str, torch.Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """In float64, keep modules from rounding to fp32, and make what they make in float64, as transformers does."""
    if dtype is not torch.float64:
        yield
        return
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(usual)


def run_reference(small: SmallModel, steps: Sequence[Sequence[Row]], train: TrainConfig) -> Reference:
    """Train the copy in float64, or in fp32 where it does not run in that.

    Raises:
        PlanError: it runs in neither.
    """
    reason = ""
    for dtype in (torch.float64, torch.float32):
        try:
            return _run(small, steps, train, dtype)
        except Exception as error:  # whatever a foreign forward raises
            reason = f"{type(error).__name__}: {error}"
    rule = f"a small copy of it does not run in one process ({reason})"
    raise PlanError(type(small.config).__name__, rule, "This architecture is not available in this version")


def _run(small: SmallModel, steps: Sequence[Sequence[Row]], train: TrainConfig, dtype: torch.dtype) -> Reference:
    model = build_whole(small, dtype)
    trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = _optimizer(trained, train)
    found = Reference(dtype, False, state_of(model))
    with precision(dtype), Rounding() as rounding:
        for number, rows in enumerate(steps):
            with recorded(model, found.outputs) if number == 0 else contextlib.nullcontext():
                loss = _forward_backward(model, rows)
            if number == 0:
                found.gradients = {
                    n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()
                }
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), train.max_grad_norm or math.inf, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
            found.losses.append(loss)
            found.norms.append(float(norm))
    if not all(map(math.isfinite, [*found.losses, *found.norms])):
        raise FloatingPointError(f"losses {found.losses}, gradient norms {found.norms}")
    found.exact = dtype is torch.float64 and not rounding.found
    return found


def _forward_backward(model: nn.Module, rows: Sequence[Row]) -> float:
    """The mean loss over the supervised tokens of ``rows``; gradients are added."""
    targets = [torch.from_numpy(row.labels[1:]).long() for row in rows]
    num_tokens = sum(int((target != -100).sum()) for target in targets)
    known = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    options = {"use_cache": False} if takes_any or "use_cache" in known else {}
    total = 0.0
    for row, target in zip(rows, targets, strict=True):
        logits = model(input_ids=torch.from_numpy(row.input_ids).long()[None], **options).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum") / num_tokens
        loss.backward()
        total += float(loss.detach())
    return total


def _optimizer(trained: Mapping[str, nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in trained.items() if decays(n, p.shape)], "weight_decay": train.weight_decay},
        {"params": [p for n, p in trained.items() if not decays(n, p.shape)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=train.momentum, foreach=False)
    betas = (train.adam_beta1, train.adam_beta2)
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=betas, eps=train.adam_eps, foreach=False)


@contextlib.contextmanager
def recorded(model: nn.Module, outputs: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Keep what each module returns while the block runs; repetitions of a backward pass are left out.

    What lies inside of an adapter's layer is left out too: its parts may be shares of a sum.
    """

    def hook(name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            is_repetition = torch._C._current_graph_task_id() != -1
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_repetition:
                outputs.setdefault(name, []).append(value.detach().clone())

        return keep

    handles = [
        module.register_forward_hook(hook(name))
        for name, module in model.named_modules()
        if name and ".base_layer" not in name and ".lora_" not in name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
