"""How a stack of experts is cut: every expert's inner features over the ranks, whatever its parameters are called.

The result of a stack is linear in one of its parameters, the last matrix. With a part of that matrix alone, the
result depends on a part of the parameters before it; where the parts of all ranks are disjoint and the results sum
to the whole, the stack is split so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.models.calling import leaving_no_state
from shardwise.spec.layout import chunk_range
from shardwise.tensor.parts import Part, find_parts
from shardwise.tensor.table import ParamCut

_ROUNDING = 1e-4


def find_expert_cuts(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], degree: int
) -> dict[str, ParamCut] | None:
    """The cut of each parameter of a stack (in float64, with what it was called with); None where there is none."""
    params = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    for last, parameter in params.items():
        if parameter.dim() != 3 or len(params) < 2:
            continue
        for dim in (1, 2):
            if parameter.shape[dim] >= degree:
                try:
                    with leaving_no_state(module):
                        cuts = _cuts_from(module, args, kwargs, params, last, dim, degree)
                except RuntimeError:  # a recurrence, say, which goes on from its last call
                    return None
                if cuts is not None:
                    return cuts
    return None


def _cuts_from(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    params: Mapping[str, nn.Parameter],
    last: str,
    dim: int,
    degree: int,
) -> dict[str, ParamCut] | None:
    """The cuts where ``last`` is the last matrix and ``dim`` that of the inner features."""
    size = params[last].shape[dim]
    whole = params[last].detach()
    others = {name: p for name, p in params.items() if name != last}
    needed: dict[str, list[torch.Tensor]] = {name: [] for name in others}
    # What is added for biases counts on one rank alone; without them, and without what passes by the matrices, the
    # ranks' results must sum to the whole.
    biases = {name: torch.zeros_like(p) for name, p in params.items() if p.dim() < 3}
    missing = torch.func.functional_call(module, biases, args, dict(kwargs)).detach()
    for rank in range(degree):
        part = torch.zeros_like(whole)
        span = (slice(None),) * dim + (slice(*chunk_range(size, degree, rank)),)
        part[span] = whole[span]
        out = torch.func.functional_call(module, {last: part}, args, dict(kwargs))
        missing = missing - torch.func.functional_call(module, biases | {last: part}, args, dict(kwargs)).detach()
        grads = torch.autograd.grad(out, list(others.values()), _weights(out), allow_unused=True)
        for name, grad in zip(others, grads, strict=True):
            needed[name].append(torch.zeros_like(params[name], dtype=torch.bool) if grad is None else grad.ne(0))
    repeated = _passed_by(module, args, kwargs, biases | {last: torch.zeros_like(whole)})
    if not torch.allclose(missing, (1 - degree) * repeated, atol=_ROUNDING * float(whole.abs().max())):
        return None
    cuts = {last: ParamCut(dim, (Part(size),), once=bool(repeated.any()))}
    for name, supports in needed.items():
        cut = _cut(supports)
        if cut is None:
            return None
        cuts[name] = cut
    # At least one matrix before the last, else its inputs are those of the stack.
    return cuts if any(cut.dim is not None and params[n].dim() == 3 for n, cut in cuts.items() if n != last) else None


def _passed_by(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], zeros: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """What of the result does not pass through a matrix (experts that hand on their input); all ranks have it."""
    return torch.func.functional_call(module, dict(zeros), args, dict(kwargs)).detach()


def _cut(supports: list[torch.Tensor]) -> ParamCut | None:
    """Parts along a dim that differ from rank to rank, or the same on all of them (a bias of the result)."""
    first = supports[0]
    if all(torch.equal(support, first) for support in supports):
        return ParamCut(once=True) if first.dim() < 3 else None
    for dim in range(1, first.dim()):
        others = [d for d in range(first.dim()) if d != dim]
        held = [support.any(dim=others).nonzero().flatten().tolist() for support in supports]
        parts = find_parts(held, first.shape[dim])
        if parts is not None:
            return ParamCut(dim, parts)
    return None


def _weights(out: torch.Tensor) -> torch.Tensor:
    return torch.rand(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2)) + 0.5
