"""``metrics.jsonl``: one JSON object for each optimizer step and each evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends lines; on a resume, what lies behind the checkpoint is cut first."""

    def __init__(self, output_dir: Path, resumed_step: int = 0) -> None:
        self._path = output_dir / FILE_NAME
        kept = [line for line in self._lines() if int(line["step"]) <= resumed_step]
        self._path.write_text("".join(map(_dump, kept)), encoding="utf-8")

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        lines = []
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:  # the last line of a killed run may be torn
                continue
        return lines

    def write(self, values: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_dump(values))


def _dump(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False) + "\n"
