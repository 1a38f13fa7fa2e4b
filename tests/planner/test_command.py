"""`shardwise estimate`: what it prints, and what it gives as data."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.errors import ConfigError
from tests.planner.test_runs import ROW

RUNS = [
    ROW | {"id": "measured", "source": "mine", "recompute": "none", "step_s_norm": "3.0", "peak_mem_gib": "30"},
    ROW | {"id": "only predicted"},
    ROW | {"id": "broken", "hidden": ""},
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "runs.csv"
    with file.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(dict.fromkeys(name for run in RUNS for name in run)))
        writer.writeheader()
        writer.writerows(RUNS)
    return file


def invoke(*words: str) -> str:
    result = CliRunner().invoke(cli.app, ["estimate", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_rows_as_data(table: Path) -> None:
    answer = json.loads(invoke("--runs", str(table), "--json"))
    assert answer["schema"] == 1
    measured, predicted, broken = answer["rows"]
    for row in (measured, predicted):
        assert row["step_seconds"] == pytest.approx(sum(row["time_terms"].values()))
        assert row["memory_bytes"] == pytest.approx(sum(row["memory_terms"].values()))
        assert row["skipped"] == ""
    assert (measured["measured_step_seconds"], predicted["measured_step_seconds"]) == (3.0, None)
    assert (broken["id"], broken["step_seconds"], broken["skipped"]) == ("broken", None, "hidden is empty")
    error = abs(measured["step_seconds"] / 3.0 - 1)
    assert answer["summary"]["time"]["dense"] == {
        "rows": 1,
        "mean_absolute": pytest.approx(error),
        "median": pytest.approx(measured["step_seconds"] / 3.0 - 1),
        "share_15_low": float(measured["step_seconds"] < 0.85 * 3.0),
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_heads": "99999"}, "n_heads = 99999 are more than hidden"),
        ({"n_layers": "1e9"}, "n_layers = 1e+09 is above 10000"),
        ({"seq_len": "1e300"}, "seq_len = 1e+300 is above"),
    ],
)
def test_a_row_that_no_model_can_have_costs_no_other_row(table: Path, changes: dict[str, str], words: str) -> None:
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows[1] |= changes
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    first, changed, _ = json.loads(invoke("--runs", str(table), "--json"))["rows"]
    assert first["skipped"] == ""
    assert words in changed["skipped"]


def test_rows_for_people(table: Path) -> None:
    text = invoke("--runs", str(table))
    assert "only predicted" in text
    assert "skipped: hidden is empty" in text
    assert "dense: step time of 1 rows, mean absolute error" in text
    assert "1 of 3 rows skipped" in text


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        CliRunner().invoke(cli.app, ["estimate", "--runs", "nowhere.csv"], catch_exceptions=False)


def test_a_line_with_too_many_cells_is_refused_by_its_number(table: Path) -> None:
    text = table.read_text(encoding="utf-8").splitlines()
    table.write_text("\n".join([*text[:2], text[2] + ",8", *text[3:]]), encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3 has 1 more cells"):
        invoke("--runs", str(table))


def test_a_row_without_an_id_is_named_by_its_line(table: Path) -> None:
    table.write_text(table.read_text(encoding="utf-8").replace("broken", ""), encoding="utf-8")
    assert "line 4: hidden is empty" in invoke("--runs", str(table))
