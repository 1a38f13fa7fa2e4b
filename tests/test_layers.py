"""The shape of the code: imports point down only, and no file or function outgrows its reader."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
SOURCES = sorted(
    path for room in ("shardwise", "tests", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")
)


def test_imports_point_down_only() -> None:
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_FILE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno + 1 > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("room", sorted(path.parent.name for path in (ROOT / "shardwise").glob("*/__init__.py")))
def test_what_a_room_says_of_its_modules_is_there(room: str) -> None:
    folder = ROOT / "shardwise" / room
    told = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert told, "a room says what it is for"
    modules = {path.stem for path in folder.iterdir()}
    assert [name for name in re.findall(r"``([a-z_]+)``", told) if name not in modules] == []
