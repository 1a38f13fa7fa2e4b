"""What a run has filled in or was started with gives way to what is given anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.front.tree import run_tree
from shardwise.spec.rules import parse_run


@pytest.mark.parametrize(
    ("file", "given", "resume", "overwrite"),
    [
        ("overwrite: true", ["resume=auto"], "auto", False),
        ("resume: auto", ["overwrite=true"], "no", True),
        ("overwrite: true", ["resume=no"], "no", True),
        ("overwrite: true", ["tp=2"], "no", True),
        ("overwrite: false", ["resume=auto"], "auto", False),
        ("resume: auto", ["overwrite=false"], "auto", False),
    ],
)
def test_what_is_given_wins_over_the_contrary_in_a_file(
    tmp_path: Path, file: str, given: list[str], resume: str, overwrite: bool
) -> None:
    (tmp_path / "run.yaml").write_text(f"model: m\n{file}\n")
    run = parse_run(run_tree([str(tmp_path / "run.yaml"), *given], {}))
    assert (run.resume, run.overwrite) == (resume, overwrite)


@pytest.mark.parametrize("given", [[], ["overwrite=true", "resume=auto"]])
def test_both_in_one_place_are_refused(tmp_path: Path, given: list[str]) -> None:
    (tmp_path / "run.yaml").write_text("model: m\n" + ("" if given else "overwrite: true\nresume: auto\n"))
    with pytest.raises(ConfigError, match="Use overwrite=false to go on, or resume=no"):
        parse_run(run_tree([str(tmp_path / "run.yaml"), *given], {}))
