"""From what each rank saw to one answer: the worst errors, and the first module that differs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.check.reference import Reference
from shardwise.spec import tolerance
from shardwise.spec.tolerance import relative_error


@dataclass(frozen=True)
class GradientPart:
    """The norm of the difference of one slice of a gradient; ``owned`` slices make up the whole, others are copies."""

    name: str
    difference: float
    owned: bool


@dataclass(frozen=True)
class RankFindings:
    """What one rank saw; losses and norms are those of the whole step, ``outputs`` errors by module."""

    losses: list[float | None]
    norms: list[float | None]
    gradients: list[GradientPart]
    outputs: dict[str, float]


@dataclass(frozen=True)
class Limits:
    """The largest errors that count as equal, by ``spec/tolerance``."""

    loss: float
    norm: float
    gradient: float


def limits(want: Reference) -> Limits:
    """Those of float64 where nothing rounds below it, else those of fp32."""
    if want.exact:
        return Limits(tolerance.FLOAT64_LOSS, tolerance.FLOAT64_GRADIENT, tolerance.FLOAT64_GRADIENT)
    return Limits(tolerance.FP32_LOSS, tolerance.FP32_NORM, tolerance.FP32_GRADIENT)


def summarise(ranks: Sequence[RankFindings], want: Reference, notes: Sequence[str]) -> dict[str, Any]:
    """The answer of one layout as plain data: ``ok``, steps, errors and limits, the first difference."""
    bounds = limits(want)
    gradients = gradient_errors([part for rank in ranks for part in rank.gradients], want)
    outputs = _largest([rank.outputs for rank in ranks])
    loss = max(_worst(rank.losses, want.losses) for rank in ranks)
    norm = max(_worst(rank.norms, want.norms) for rank in ranks)
    worst = max(gradients, key=lambda name: gradients[name])
    ok = loss <= bounds.loss and norm <= bounds.norm and gradients[worst] <= bounds.gradient
    first = ranks[0]
    return {
        "ok": ok,
        "precision": str(want.dtype).removeprefix("torch.") + ("" if want.exact else ", rounded to fp32 by the model"),
        "steps": [
            {"loss": a, "ref_loss": b, "grad_norm": c, "ref_grad_norm": d}
            for a, b, c, d in zip(first.losses, want.losses, first.norms, want.norms, strict=True)
        ],
        "errors": {"loss": loss, "grad_norm": norm, "gradient": gradients[worst]},
        "limits": {"loss": bounds.loss, "grad_norm": bounds.norm, "gradient": bounds.gradient},
        "worst_gradient": {"name": worst, "error": gradients[worst]},
        "gradients": worst_by_module(gradients),
        "first_difference": None if ok else first_difference(outputs, gradients, list(want.outputs), bounds.gradient),
        "num_modules": len(outputs),
        "notes": list(notes),
    }


def gradient_errors(parts: Sequence[GradientPart], want: Reference) -> dict[str, float]:
    """Parameter -> error of its gradient, in the model's order: that of the owned slices together, or of a copy."""
    whole = math.sqrt(sum(float(gradient.norm()) ** 2 for gradient in want.gradients.values()))
    owned: dict[str, float] = {}
    copies: dict[str, float] = {}
    for part in parts:
        if part.owned:
            owned[part.name] = owned.get(part.name, 0.0) + part.difference**2
        else:
            copies[part.name] = _max(copies.get(part.name, 0.0), part.difference)
    missing = want.gradients.keys() - owned.keys()
    assert not missing, f"no rank owns {sorted(missing)}"
    errors = {}
    for name, gradient in want.gradients.items():
        difference = _max(math.sqrt(owned[name]), copies.get(name, 0.0))
        errors[name] = _finite(relative_error(difference, float(gradient.norm()), whole))
    return errors


def worst_by_module(gradients: Mapping[str, float]) -> dict[str, float]:
    """Module -> the largest error among its own parameters' gradients."""
    worst: dict[str, float] = {}
    for name, error in gradients.items():
        module = name.rpartition(".")[0]
        worst[module] = max(worst.get(module, 0.0), error)
    return worst


def first_difference(
    outputs: Mapping[str, float], gradients: Mapping[str, float], order: Sequence[str], limit: float
) -> dict[str, Any]:
    """Where one looks first: the first module, in the order of the forward pass, that returns something else.

    Where all return the same, the backward pass is at fault. It runs from the loss to the embedding, and carries a
    mistake along: so the module that is nearest to the loss among those with a different gradient.
    """
    for name in order:
        if outputs.get(name, 0.0) > limit:
            return {"module": name, "what": "output", "error": outputs[name]}
    modules = worst_by_module(gradients)
    places = {name: place for place, name in enumerate(order)}
    wrong = [name for name, error in modules.items() if error > limit]
    if wrong:
        name = max(wrong, key=lambda module: places.get(module, -1))
        return {"module": name, "what": "gradient", "error": modules[name]}
    return {"module": "the loss, the gradient norm or the optimizer", "what": "step", "error": None}


def _largest(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for found in errors:
        for name, error in found.items():
            largest[name] = _max(largest.get(name, 0.0), error)
    return {name: _finite(error) for name, error in largest.items()}


def _worst(got: Sequence[float | None], want: Sequence[float]) -> float:
    errors = (math.inf if g is None else relative_error(abs(g - w), abs(w)) for g, w in zip(got, want, strict=True))
    return max(_finite(error) for error in errors)


def _max(first: float, second: float) -> float:
    """The larger; not a number counts as infinite."""
    return max(_finite(first), _finite(second))


def _finite(error: float) -> float:
    return math.inf if math.isnan(error) else error
