"""A software stack's three numbers from a user's own runs.

Fitted are the logarithms of predicted over measured step times, by least squares in which a run that is far off counts
less (soft L1). As few numbers are fitted as predict runs best that they were not fitted to: each configuration in turn
is left out and predicted from the others. What the numbers are then worth is the error of these predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares  # type: ignore[import-untyped]

from shardwise.errors import ConfigError
from shardwise.planner.accuracy import Prediction, errors
from shardwise.planner.cost import estimate
from shardwise.planner.runs import Run, read_run
from shardwise.spec.cluster import ClusterSpec, Stack, load_cluster

# Which numbers are fitted together, and the bounds of each.
CHOICES = (
    ("slowdown",),
    ("slowdown", "host_seconds"),
    ("slowdown", "attention"),
    ("slowdown", "attention", "host_seconds"),
)
BOUNDS = {"slowdown": (0.3, 10.0), "attention": (0.3, 10.0), "host_seconds": (1e-7, 1e-3)}
LEAST_CONFIGURATIONS = 3
_OFF = 0.1  # of a step time: from here on a run counts less
_STEP = 1e-3  # of a logarithm, to find a slope
_WORTH, _SEEN = 0.95, 0.005  # a further number must bring the error down to this share, and by this much


@dataclass(frozen=True)
class Calibration:
    """What was fitted.

    Args:
        cluster: the profile of the runs' devices, its stack the fitted one.
        fitted: names of the stack's numbers that were free.
        before: errors of all runs as the profile came, ``after`` of all runs, each predicted from the others.
    """

    cluster: ClusterSpec
    fitted: tuple[str, ...]
    configurations: int
    before: dict[str, float]
    after: dict[str, float]

    def answer(self) -> dict[str, Any]:
        """For `shardwise estimate --json`."""
        stack = self.cluster.stack
        return {
            "cluster": self.cluster.name,
            "stack": {name: getattr(stack, name) for name in BOUNDS},
            "fitted": list(self.fitted),
            "configurations": self.configurations,
            "before": self.before,
            "after": self.after,
        }


def calibrate(predictions: Sequence[Prediction]) -> Calibration:
    """The stack under which the measured step times of rows with their full configuration come out best.

    Raises:
        ConfigError: too few configurations, runs on several chips or stacks, or no numbers that predict better.
    """
    measured = [read_run(one.row) for one in predictions if one.scored and one.time_error is not None]
    configurations = _configurations(measured)
    count = max(configurations, default=-1) + 1
    if count < LEAST_CONFIGURATIONS:
        rule = f"needs measured step times of {LEAST_CONFIGURATIONS} different configurations, and the file has {count}"
        remedy = "Add runs that differ in degrees, batch or length, each with its recomputation"
        raise ConfigError("--calibrate", rule, remedy)
    for what, names in (
        ("chips", {run.cluster.name for run in measured}),
        ("software stacks", {run.cluster.stack.name for run in measured}),
    ):
        if len(names) > 1:
            rule = f"fits one profile, and the runs are of several {what}: {', '.join(sorted(names))}"
            raise ConfigError("--calibrate", rule, "Give the runs of one of them")
    before = _mean([_log_ratio(run, run.cluster.stack) for run in measured])
    best: tuple[float, tuple[str, ...], Stack, list[float]] | None = None
    for free in CHOICES:
        if len(free) >= count:
            continue
        stack, others = _fit(measured, configurations, free)
        if best is None or _mean(others) < min(_WORTH * best[0], best[0] - _SEEN):
            best = _mean(others), free, stack, others
    assert best is not None
    if best[0] >= before:
        rule = f"predicts runs that were left out with an error of {best[0]:.1%}, and the profile as it is {before:.1%}"
        raise ConfigError("--calibrate", rule, "Use the profile as it is, or add runs")
    return Calibration(
        replace(_common(measured), stack=best[2]),
        best[1],
        count,
        errors(_error(_log_ratio(run, run.cluster.stack)) for run in measured),
        errors(_error(one) for one in best[3]),
    )


def _fit(runs: Sequence[Run], configurations: Sequence[int], free: tuple[str, ...]) -> tuple[Stack, list[float]]:
    """The fitted stack, and of each run the logarithm of its error when its configuration is left out.

    What changes when a configuration is left out is small, so it is found on the straight line through the whole fit;
    the run itself is then predicted by the model.
    """
    first = runs[0].cluster.stack
    low, high = (np.log([BOUNDS[name][side] for name in free]) for side in (0, 1))
    start = np.clip(np.log([getattr(first, name) for name in free]), low + 1e-6, high - 1e-6)

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.array([_log_ratio(run, _stack(first, free, x)) for run in runs])

    options: dict[str, Any] = {"loss": "soft_l1", "f_scale": _OFF}
    found = least_squares(residuals, start, bounds=(low, high), diff_step=_STEP, max_nfev=30, **options)
    ends = residuals(found.x)
    # The solver's own slopes are scaled by the weights of the loss.
    slopes = np.stack([(residuals(found.x + step) - ends) / _STEP for step in _STEP * np.eye(len(free))], axis=1)
    numbers = np.array(configurations)
    left_out = {}
    for one in sorted(set(configurations)):
        kept = numbers != one

        def moved(step: np.ndarray, kept: np.ndarray = kept) -> np.ndarray:
            return np.asarray((ends + slopes @ step)[kept])

        bounds = (low - found.x - 1e-9, high - found.x + 1e-9)
        left_out[one] = found.x + least_squares(moved, np.zeros(len(free)), bounds=bounds, **options).x
    others = [
        _log_ratio(run, _stack(first, free, left_out[one])) for run, one in zip(runs, configurations, strict=True)
    ]
    return _stack(first, free, found.x), others


def _stack(first: Stack, free: Sequence[str], x: np.ndarray) -> Stack:
    values = {name: float(f"{value:.6g}") for name, value in zip(free, np.exp(x), strict=True)}
    return replace(first, name="calibrated", **values)  # type: ignore[arg-type]


def _log_ratio(run: Run, stack: Stack) -> float:
    made = estimate(run.costs, replace(run.cluster, stack=stack), run.layout, run.work)
    return float(np.log(made.step_seconds / (run.seconds or 1.0)))


def _error(log_ratio: float) -> float:
    return float(np.expm1(log_ratio))


def _mean(log_ratios: Sequence[float]) -> float:
    return float(np.mean(np.abs(np.expm1(log_ratios))))


def _configurations(runs: Sequence[Run]) -> list[int]:
    """For each run the number of its configuration: repeated runs of one are left out together."""
    known: dict[tuple[Any, ...], int] = {}
    keys = [
        (run.costs.name, run.costs.hidden_size, run.costs.order, run.costs.vocab_size, run.layout, run.work)
        for run in runs
    ]
    return [known.setdefault(key, len(known)) for key in keys]


def _common(runs: Sequence[Run]) -> ClusterSpec:
    """The devices of the runs; where their rows name several networks, the profile's own."""
    clusters = [replace(run.cluster, stack=runs[0].cluster.stack) for run in runs]
    return clusters[0] if all(one == clusters[0] for one in clusters) else load_cluster(clusters[0].name)
