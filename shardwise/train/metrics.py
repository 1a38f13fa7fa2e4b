"""``metrics.jsonl``: one JSON object for each optimizer step and each evaluation. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.files import replace_text
from shardwise.train.callbacks import Callback, RunInfo

FILE_NAME = "metrics.jsonl"
_TAIL_BYTES = 2**20  # holds some lines, also of steps with many row hashes


class MetricsFile(Callback):
    """Appends lines; what lies behind the checkpoint that a run goes on from is cut with its first step."""

    main_only = True
    may_stop = False

    def on_train_begin(self, info: RunInfo) -> None:
        self._path, self._first_step, self._is_cut = info.output_dir / FILE_NAME, info.first_step, False

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        if not self._is_cut:  # not before there is something to put in its place: the run may fail until then
            kept = [line for line in read_metrics(self._path.parent) if int(line["step"]) <= self._first_step]
            replace_text(self._path, "".join(map(_dump, kept)))
            self._is_cut = True
        self._append(metrics)

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        self._append(metrics)

    def _append(self, values: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_dump(values))


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` in their order; none where there is no file."""
    return _parsed(_text(output_dir / FILE_NAME))


def last_step(output_dir: Path) -> int:
    """Number of the last step that has a line in ``metrics.jsonl``; 0 if none has."""
    path = output_dir / FILE_NAME
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = file.read().decode("utf-8", "replace")
    return max((int(line["step"]) for line in _parsed(tail) if line.get("kind") == "train"), default=0)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _parsed(text: str) -> list[dict[str, Any]]:
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the last line of a killed run may be torn
            continue
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def _dump(values: Mapping[str, Any]) -> str:
    """One line; NaN and infinity, which JSON does not have, become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, ensure_ascii=False) + "\n"
