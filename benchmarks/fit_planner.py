"""Fits the few free numbers of the planner's profiles to published runs, and says what they are on the other half.

Free are the size at which a chip's products reach half their speed, and the three numbers of each software stack on
a family of chips. Whole (source, model) groups go either to the fit or to the check. Nothing is written; what is
printed goes into profiles/*.json by hand.

    python benchmarks/fit_planner.py [a100 h100 ...]
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from shardwise.planner.accuracy import errors, is_scored, read_rows
from shardwise.planner.cost import estimate
from shardwise.planner.runs import Row, Run, SkippedRow, read_run

TABLE = Path(__file__).resolve().parents[1] / "tests/planner/published.csv"
FREE = ("slowdown", "attention", "host_seconds")
LOW, HIGH = np.array([0.9, 0.6, 1e-6]), np.array([2.0, 3.5, 3e-5])
SIZES = (60.0, 700.0)
EVERY = 5  # of the largest source one row in so many


def fit_groups(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """The (source, model) groups to fit: of each source, in an order that a hash gives, those that make up half."""
    sizes = Counter((row["source"], row["model_name"]) for row in rows)
    sides: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    chosen = set()
    for group in sorted(sizes, key=lambda names: hashlib.sha256("/".join(names).encode()).digest()):
        side = sides[group[0]]
        fits = side[0] <= side[1]
        side[0 if fits else 1] += sizes[group]
        if fits:
            chosen.add(group)
    return chosen


def load() -> list[tuple[Run, Row]]:
    """The scored rows that can be predicted."""
    runs: list[tuple[Run, Row]] = []
    for index, row in enumerate(read_rows(TABLE)):
        if not is_scored(row) or not row["step_s_norm"] or ("single-node" in row["source"] and index % EVERY):
            continue
        try:
            runs.append((read_run(row), row))
        except SkippedRow:
            continue
    return runs


def family(run: Run) -> str:
    """Chips that share what is fitted: ``ascend``, ``a100``."""
    return run.cluster.chip.name.split("-")[0]


def fitted_groups(runs: Sequence[tuple[Run, Row]]) -> set[tuple[str, str, str]]:
    """(family, source, model) of what is fitted, over all families; the rest is for checking."""
    chosen = set()
    for name in {family(run) for run, _ in runs}:
        rows = [row for run, row in runs if family(run) == name]
        chosen |= {(name, *group) for group in fit_groups(rows)}
    return chosen


def predicted(run: Run, size: float, numbers: np.ndarray) -> float:
    """Seconds of a run under other numbers."""
    chip = replace(run.cluster.chip, half_size=size)
    stack = replace(run.cluster.stack, **dict(zip(FREE, map(float, numbers), strict=True)))
    return estimate(run.costs, replace(run.cluster, chip=chip, stack=stack), run.layout, run.work).step_seconds


def fit(runs: list[tuple[Run, Row]]) -> None:
    """One family: its size, and three numbers a stack."""
    stacks = sorted({run.cluster.stack.name for run, _ in runs})
    first = runs[0][0].cluster.chip.half_size
    start = np.concatenate([[first], *(_numbers(runs, name) for name in stacks)])
    low = np.concatenate([[SIZES[0]], *([LOW] * len(stacks))])
    high = np.concatenate([[SIZES[1]], *([HIGH] * len(stacks))])
    start = np.clip(start, low * 1.001, high * 0.999)
    groups = fit_groups([row for _, row in runs])
    chosen = [(run, row) for run, row in runs if (row["source"], row["model_name"]) in groups]
    others = [(run, row) for run, row in runs if (row["source"], row["model_name"]) not in groups]

    def logarithms(x: np.ndarray, some: list[tuple[Run, Row]]) -> np.ndarray:
        x = np.exp(x)
        place = {name: x[1 + 3 * i : 4 + 3 * i] for i, name in enumerate(stacks)}
        return np.array(
            [np.log(predicted(run, x[0], place[run.cluster.stack.name]) / (run.seconds or 1.0)) for run, _ in some]
        )

    found = least_squares(
        logarithms,
        np.log(start),
        bounds=(np.log(low), np.log(high)),
        args=(chosen,),
        loss="soft_l1",
        f_scale=0.1,
        diff_step=1e-2,
        max_nfev=15,
    )
    x = np.exp(found.x)
    print(f"{family(runs[0][0])}: half_size {x[0]:.0f}")
    for i, name in enumerate(stacks):
        print(f"   {name}:", {key: float(f"{value:.3g}") for key, value in zip(FREE, x[1 + 3 * i :], strict=False)})
    for label, some in (("fit", chosen), ("check", others)):
        off = np.exp(logarithms(found.x, some)) - 1 if some else np.array([])
        for source in sorted({row["source"] for _, row in some}):
            own = errors(value for value, (_, row) in zip(off, some, strict=True) if row["source"] == source)
            print(f"   {label:5s} {source[:44]:44s}", _shown(own))


def _numbers(runs: list[tuple[Run, Row]], stack: str) -> list[float]:
    own = next(run.cluster.stack for run, _ in runs if run.cluster.stack.name == stack)
    return [getattr(own, name) for name in FREE]


def _shown(values: dict[str, float]) -> str:
    return f"{values['rows']:4d} rows, error {values['mean_absolute']:6.1%}, median {values['median']:+6.1%}"


def main() -> None:
    """Fits every family that was named, else all."""
    runs = load()
    for name in sys.argv[1:] or sorted({family(run) for run, _ in runs}):
        fit([pair for pair in runs if family(pair[0]) == name])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
