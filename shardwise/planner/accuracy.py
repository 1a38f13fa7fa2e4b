"""Predictions of a table of runs, and how far they are from what was measured."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from shardwise.errors import ConfigError
from shardwise.planner.cost import Estimate, estimate
from shardwise.planner.runs import Row, SkippedRow, read_run

_CONFIGURED = ["n_layers", "hidden", "n_heads", "seq_len", "global_batch_seqs", "micro_batch", "tp", "pp"]
_JOB = ("source", "framework", "chip", "num_devices", "global_batch_seqs", "precision")
_SAME = (*_JOB, "model_name", "n_layers", "hidden", "seq_len")
_VARIED = ("micro_batch", "tp", "pp", "vpp", "dp", "cp", "ep", "sp", "recompute", "zero_stage_or_fsdp")
_RANKED = 4  # configurations of a model on the same devices from which a ranking counts


@dataclass(frozen=True)
class Prediction:
    """One row with what was predicted of it; ``skipped`` says why nothing was.

    ``seconds`` and ``memory_bytes`` are the measured values; ``scored``: the row gives its full configuration.
    """

    row: Row
    estimate: Estimate | None
    skipped: str
    scored: bool
    seconds: float | None
    memory_bytes: float | None

    @property
    def id(self) -> str:
        """Its id, else its line in the file."""
        return self.row.get("id", "") or f"line {self.row.get('line', '?')}"

    @property
    def kind(self) -> str:
        return "moe" if self.row.get("moe_experts") else "dense"

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time, minus 1."""
        if self.estimate is None or not self.seconds:
            return None
        return self.estimate.step_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, minus 1."""
        if self.estimate is None or not self.memory_bytes:
            return None
        return self.estimate.memory_bytes / self.memory_bytes - 1


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file.

    Raises:
        ConfigError: no such file, or no table with the needed columns.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"--runs {path}", "no such file", "Give a CSV file with one run a row")
    try:
        with file.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle)
            rows = [_row(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--runs {path}", f"cannot be read ({error})", "Give a CSV file in UTF-8") from None
    missing = [name for name in ("n_layers", "hidden", "chip") if rows and name not in rows[0]]
    if missing or not rows:
        rule = f"has no column {', '.join(missing)}" if missing else "has no rows"
        raise ConfigError(f"--runs {path}", rule, "Give one run a row, its columns named in the first line")
    return rows


def _row(path: str | Path, line: int, row: Mapping[str | None, Any]) -> dict[str, str]:
    """One row by its columns; ``line`` is where it ends in the file, unless that is a column."""
    if None in row:
        rule = f"line {line} has {len(row[None])} more cells than the first line names columns"
        raise ConfigError(f"--runs {path}", rule, "Put cells that hold a comma in quotes")
    return {"line": str(line)} | {name: value or "" for name, value in row.items() if name}


def is_scored(row: Row) -> bool:
    """Whether a row gives its whole configuration, in a precision that a model trains in by default."""
    recompute, precision = row.get("recompute", "").lower(), row.get("precision", "").lower()
    unknown = not recompute or any(words in recompute for words in ("not in table", "not stated", "see "))
    low = any(word in precision for word in ("fp8", "float8", "fp4"))
    return all(row.get(name) for name in _CONFIGURED) and row.get("quality", "A") in ("A", "B") and not (unknown or low)


def predict(rows: Iterable[Row]) -> list[Prediction]:
    """One prediction a row, in their order."""
    return [_predict(row) for row in rows]


def _predict(row: Row) -> Prediction:
    try:
        run = read_run(row)
    except SkippedRow as reason:
        return Prediction(row, None, str(reason), False, None, None)
    made = estimate(run.costs, run.cluster, run.layout, run.work)
    return Prediction(row, made, "", is_scored(row), run.seconds, run.memory_bytes)


def answer(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """What `shardwise estimate --json` gives: rows with their terms, and errors where something was measured."""
    return {"schema": 1, "rows": [_answer_row(one) for one in predictions], "summary": summary(predictions)}


def _answer_row(one: Prediction) -> dict[str, Any]:
    made = one.estimate
    fullest: dict[str, float] = max(made.memory_terms, key=lambda terms: sum(terms.values())) if made else {}
    return {
        "id": one.id,
        "step_seconds": made.step_seconds if made else None,
        "memory_bytes": made.memory_bytes if made else None,
        "time_terms": made.time_terms if made else {},
        "memory_terms": fullest,
        "bubble": made.bubble if made else None,
        "measured_step_seconds": one.seconds,
        "measured_memory_bytes": one.memory_bytes,
        "scored": one.scored,
        "skipped": one.skipped,
    }


def summary(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Errors by kind and source; the rows that are not scored apart."""
    scored = [one for one in predictions if one.scored]
    return {
        "rows": len(predictions),
        "skipped": sum(1 for one in predictions if one.skipped),
        "time": {kind: errors(_times(scored, kind)) for kind in ("dense", "moe")},
        "time_by_source": _by(scored, "source", time=True),
        "time_not_scored": {
            kind: errors(_times([one for one in predictions if not one.scored], kind)) for kind in ("dense", "moe")
        },
        "memory": errors([one.memory_error for one in scored]),
        "memory_by_kind": _by(scored, "mem_kind", time=False),
        "ranking": regret(scored),
    }


def _times(predictions: Sequence[Prediction], kind: str) -> list[float | None]:
    return [one.time_error for one in predictions if one.kind == kind]


def _by(predictions: Sequence[Prediction], column: str, time: bool) -> dict[str, Any]:
    groups: dict[str, list[float | None]] = defaultdict(list)
    for one in predictions:
        groups[one.row.get(column, "")].append(one.time_error if time else one.memory_error)
    found = {name: errors(values) for name, values in sorted(groups.items())}
    return {name: values for name, values in found.items() if values["rows"]}


def errors(values: Iterable[float | None]) -> dict[str, float]:
    """Number of errors, mean of their sizes, their median, and the share that are more than 15 % too low."""
    known = [value for value in values if value is not None]
    if not known:
        return {"rows": 0}
    return {
        "rows": len(known),
        "mean_absolute": fmean(abs(value) for value in known),
        "median": median(known),
        "share_15_low": fmean(value < -0.15 for value in known),
    }


def regret(predictions: Sequence[Prediction]) -> dict[str, float]:
    """By how much the predicted best of a group costs more than the measured best, on average.

    A group is one model on the same devices with the same work a step; runs of one configuration count once, by
    their mean.
    """
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Prediction]]] = defaultdict(lambda: defaultdict(list))
    for one in predictions:
        if one.time_error is not None:
            key = tuple(one.row.get(name, "") for name in _SAME)
            groups[key][tuple(one.row.get(name, "") for name in _VARIED)].append(one)
    losses = [loss for members in groups.values() if (loss := _loss(list(members.values()))) is not None]
    return {"groups": len(losses), "mean_loss": fmean(losses)} if losses else {"groups": 0}


def _loss(configurations: list[list[Prediction]]) -> float | None:
    if len(configurations) < _RANKED:
        return None
    pairs = [
        (
            fmean(one.estimate.step_seconds for one in same if one.estimate is not None),
            fmean(one.seconds for one in same if one.seconds is not None),
        )
        for same in configurations
    ]
    return min(pairs)[1] / min(measured for _, measured in pairs) - 1
