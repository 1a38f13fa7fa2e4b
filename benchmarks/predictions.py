"""Writes the table of predicted against measured that the docs show, one published run a row.

    python -m benchmarks.predictions

``docs/predictions.csv`` then holds what today's formulas say; a test compares.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fit_planner import TABLE, family, fitted_groups, load
from shardwise.planner.accuracy import Prediction, predict, read_rows
from shardwise.planner.runs import read_run

FILE = Path(__file__).resolve().parents[1] / "docs/predictions.csv"
COLUMNS = (
    "id",
    "source",
    "model",
    "chip",
    "devices",
    "kind",
    "rows",
    "step_seconds",
    "predicted_seconds",
    "time_error",
    "memory_kind",
    "memory_gib",
    "predicted_gib",
    "memory_error",
    "left_out",
)


def sides(predictions: Sequence[Prediction]) -> list[str]:
    """Of each row whether its group was fitted or is for checking; empty for rows that are not scored."""
    fitted = fitted_groups(load())
    found = []
    for one in predictions:
        row = one.row
        if not one.scored:
            found.append("")
            continue
        group = (family(read_run(row)), row["source"], row["model_name"])
        found.append("fit" if group in fitted else "check")
    return found


def table_row(one: Prediction, side: str) -> dict[str, str]:
    """A row of the table: measured, predicted and the relative error, as text."""
    row, made = one.row, one.estimate
    has_memory = made is not None and one.memory_bytes is not None
    return {
        "id": one.id,
        "source": row["source"],
        "model": row["model_name"],
        "chip": row["chip"],
        "devices": row["num_devices"],
        "kind": one.kind,
        "rows": side or "not scored",
        "step_seconds": _number(one.seconds),
        "predicted_seconds": _number(made.step_seconds if made else None),
        "time_error": _share(one.time_error),
        "memory_kind": row["mem_kind"] if has_memory else "",
        "memory_gib": _number(one.memory_bytes, 2**30),
        "predicted_gib": _number(made.memory_bytes, 2**30) if made is not None and has_memory else "",
        "memory_error": _share(one.memory_error),
        "left_out": one.skipped,
    }


def _number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.4g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def main() -> None:
    """Write the file."""
    predictions = predict(read_rows(TABLE))
    with FILE.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table_row(*pair) for pair in zip(predictions, sides(predictions), strict=True))


if __name__ == "__main__":
    main()
