"""The table of architectures in the documentation: from what three surveys find to both pages.

    python -m tests.architectures.table                     pages from the findings that are kept
    python -m tests.architectures.table --survey NOTES      the surveys first, new findings from them
    python -m tests.architectures.table --published NOTES   that of the tensor split alone, where a published plan moves
                                                            less than the table: the other findings stay

NOTES is a file of lines to which each result is added as it comes: a survey that was stopped goes on where it was, and
an architecture whose lines are taken out is examined again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.architectures import hybrid, survey, tensor
from tests.architectures.pages import write_pages
from tests.architectures.rows import Row, row_of, with_split
from tests.architectures.tensor import CHEAPER, SAME

FINDINGS = Path(__file__).with_name("findings.json")
STEPS = ("pipeline", "tensor", "hybrid")
Notes = dict[tuple[str, str], dict[str, Any]]


def read_notes(path: Path) -> Notes:
    """(step, architecture) -> its last finding, as plain data."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(note["step"], note["finding"]["name"]): note["finding"] for note in map(json.loads, lines)}


def run_surveys(path: Path, names: Iterable[str], workers: int, steps: Iterable[str] = STEPS) -> Notes:
    """Examine what ``path`` has no line of, and return all of them."""
    names = list(names)
    with path.open("a", encoding="utf-8") as file:
        for step in steps:
            known = read_notes(path)
            missing = [name for name in names if (step, name) not in known]
            for finding in _findings(step, missing, workers):
                file.write(json.dumps({"step": step, "finding": asdict(finding)}) + "\n")
                file.flush()
                print(f"{step}: {_shown(finding)}", flush=True)
    return read_notes(path)


def _findings(step: str, names: list[str], workers: int) -> Iterable[Any]:
    if not names:
        return []
    if step == "pipeline":
        return survey.survey(names, workers)
    if step == "tensor":
        return tensor.survey(names, workers)
    return hybrid.survey(names)  # each runs four processes


def _shown(finding: Any) -> str:
    if isinstance(finding, survey.Finding):
        return survey.line(finding)
    return tensor.line(finding) if isinstance(finding, tensor.TensorFinding) else str(finding)


def rows_from(notes: Notes) -> dict[str, Row]:
    """One row for each architecture that the surveys of the pipeline cut and of the tensor split have examined."""
    names = sorted({name for _, name in notes})
    every = {name: [notes.get((step, name)) for step in STEPS] for name in names}
    return {name: row_of(*found) for name, found in every.items() if None not in found[:2]}


def beside_published(rows: Mapping[str, Row]) -> list[str]:
    """The architectures whose table does not stand for the published plan by itself."""
    return [name for name, row in rows.items() if row.published and row.counts and row.tensor not in (SAME, CHEAPER)]


def read_findings() -> tuple[dict[str, str], dict[str, Row]]:
    """Versions of the libraries, and the rows by model type."""
    data = json.loads(FINDINGS.read_text(encoding="utf-8"))
    return data["versions"], {name: Row(**row) for name, row in data["architectures"].items()}


def write_findings(rows: Mapping[str, Row]) -> None:
    """One line for each architecture; what a row has at its default is left out."""
    versions = {package: version(package) for package in ("torch", "transformers")}
    default = asdict(Row())
    lines = [
        f"  {json.dumps(name)}: {json.dumps({k: v for k, v in asdict(row).items() if v != default[k]})}"
        for name, row in sorted(rows.items())
    ]
    text = f'{{"versions": {json.dumps(versions)},\n "architectures": {{\n' + ",\n".join(lines) + "\n}}\n"
    FINDINGS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--survey", type=Path, metavar="NOTES", help="examine what this file has no lines of")
    parser.add_argument("--only", action="append", help="a model type (may be given several times)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--published", type=Path, metavar="NOTES", help="the tensor split alone, of what is open")
    options = parser.parse_args()
    if options.published is not None:
        _, rows = read_findings()
        names = options.only or beside_published(rows)
        notes = run_surveys(options.published, names, options.workers, ("tensor",))
        write_findings(rows | {name: with_split(rows[name], notes["tensor", name]) for name in names})
    if options.survey is not None:
        kept = read_findings()[1] if options.only else {}  # rows of the others stay
        notes = run_surveys(options.survey, options.only or survey.architectures(), options.workers)
        write_findings(kept | rows_from(notes))
    write_pages(*read_findings())


if __name__ == "__main__":
    main()
