"""The steps of the survey on one configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import PlanError
from shardwise.models.calling import call_model
from shardwise.models.chain import find_chain
from shardwise.models.shrink import build_small, shrink
from shardwise.models.structure import find_structure
from shardwise.parallel.pipeline import StageCut, cut_modules
from shardwise.spec.tolerance import FLOAT64_GRADIENT, FP32_GRADIENT, relative_error

ROWS, LENGTH = 2, 12
NUM_STAGES = 3  # as many as there are blocks, where there are fewer: so something passes through a stage


def examine_into(finding: Any, config: Any) -> None:
    """Fill ``finding``, until a step fails."""
    start = time.monotonic()
    try:
        small = shrink(config)
        model = build_small(small)
    except Exception as error:
        finding.builds = _reason(error)
        return
    finding.builds, finding.build_seconds = "ok", time.monotonic() - start
    finding.class_name = type(model).__name__
    finding.num_parameters = sum(p.numel() for p in model.parameters())
    start = time.monotonic()
    for dtype in (torch.float64, torch.float32):
        try:
            model = build_small(small, dtype)
            finding.causal = _runs(model)
            finding.forward = "ok" if dtype is torch.float64 else f"ok in float32 ({finding.forward})"
            break
        except Exception as error:
            finding.forward = _reason(error)
    finding.forward_seconds = time.monotonic() - start
    finding.stored_buffers = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key in module._buffers
        if key not in module._non_persistent_buffers_set
    ]
    if not finding.runs:
        return
    try:
        structure = find_structure(model)
    except PlanError as error:
        finding.structure = f"refused: {error}"
        return
    finding.structure, finding.num_blocks = "ok", structure.num_blocks
    finding.kinds = list(structure.kinds)
    dtype = next(model.parameters()).dtype
    _cut(finding, lambda: build_small(small, dtype), structure)


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [rows, length] away from the special ones, and their positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 40, (ROWS, LENGTH), generator=generator)
    return ids, torch.arange(LENGTH).expand(ROWS, LENGTH)


def _runs(model: Any) -> bool:
    """Forward and backward; whether a token's logits are independent of what follows it."""
    ids, positions = inputs()
    logits = call_model(model, ids, positions)
    assert logits.isfinite().all(), "logits are not finite"
    logits.sum().backward()
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters()), "no gradient"
    changed = ids.clone()
    changed[:, -1] = changed[:, -1] - 1
    with torch.no_grad():
        other = call_model(model, changed, positions)
    assert not torch.allclose(other[:, -1], logits[:, -1]), "the last token changes nothing"
    return torch.allclose(other[:, :-1], logits[:, :-1], rtol=1e-4, atol=1e-5)


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _cut(finding: Any, build: Callable[[], Any], structure: Any) -> None:
    """Compare its stages, run one after the other in this process, with the whole model."""
    try:
        chain = find_chain(build(), structure)
    except PlanError as error:
        finding.pipeline = f"refused: {error.rule}"
        return
    try:
        finding.pipeline_error, where = largest_error(build, structure, chain)
    except Exception as error:
        finding.pipeline = _reason(error)
        return
    limit = FLOAT64_GRADIENT if finding.forward == "ok" else FP32_GRADIENT
    exact = finding.pipeline_error <= limit
    finding.pipeline = "exact" if exact else f"differs by {finding.pipeline_error:.1e} at {where}"


def largest_error(build: Callable[[], Any], structure: Any, chain: Any) -> tuple[float, str]:
    """The largest error of logits and of every parameter's gradient, and where it is.

    ``build`` returns the same model each time: a copy of one that has run may keep what it computed.
    """
    ids, positions = inputs()
    ends = sorted({structure.num_blocks * part // NUM_STAGES for part in range(1, NUM_STAGES)} - {0})
    cuts = [StageCut(*pair) for pair in zip([0, *ends], [*ends, structure.num_blocks], strict=True)]
    model = build()
    stages = [cut_modules(build(), structure, chain, cut) for cut in cuts]
    want = call_model(model, ids, positions)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(want.dtype)
    (want * weights).sum().backward()
    borders = []
    given: tuple[torch.Tensor, ...] = (ids,)
    for stage in stages:
        sent = stage(*given, position_ids=positions, input_ids=ids)
        sent = sent if isinstance(sent, tuple) else (sent,)
        given = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent)
        borders.append((sent, given))
    (got,) = given
    got.grad = weights
    for sent, received in reversed(borders):
        pairs = [(s, r.grad) for s, r in zip(sent, received, strict=True) if r.grad is not None]
        torch.autograd.backward([s for s, _ in pairs], [grad for _, grad in pairs])
    gradients: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                name = (
                    f"{structure.embedding}.weight" if structure.tied and name == f"{structure.head}.weight" else name
                )
                gradients[name] = gradients.get(name, 0) + parameter.grad
    owned = [name for stage in stages for name, _ in stage.model.named_parameters()]
    tied = [f"{structure.head}.weight"] if structure.tied else []
    whole = [name for name, _ in model.named_parameters()] + tied
    assert sorted(owned) == sorted(whole), f"parameters of one side only: {sorted(set(owned) ^ set(whole))}"
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert wanted.keys() == gradients.keys(), "other parameters have gradients"
    total = float(torch.stack([grad.norm() for grad in wanted.values()]).norm())
    errors = {name: _error(gradients[name], grad, total) for name, grad in wanted.items()}
    errors["logits"] = _error(got, want, 0.0)
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where


def _error(got: torch.Tensor, want: torch.Tensor, total: float) -> float:
    error = relative_error(float((got - want).detach().norm()), float(want.detach().norm()), total)
    return error if error == error else float("inf")
