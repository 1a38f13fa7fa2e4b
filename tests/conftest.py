"""Shared by all tests: the largest error of the parity table is shown at the end, so that drift shows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from shardwise import testing
from shardwise.front.measuring import keep
from shardwise.machine import available_cores
from tests import long
from tests.measure.made_samples import made_samples

# The machine is shared: a slow example is no fault.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
testing.PRELOAD.append(
    "tests.parallel.harness"
)  # most tests of ranks need it; importing it costs each a third of a second


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="all rows of the large tables (tests/long.py)")


def pytest_configure(config: pytest.Config) -> None:
    long.EVERYTHING = config.getoption("--long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many slow tests come first: at the end a worker should not be alone with one."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


_WORST: dict[str, tuple[float, str]] = {}


def _note(kind: str, error: float, test: str) -> None:
    if error >= _WORST.get(kind, (-1.0, ""))[0]:
        _WORST[kind] = (error, test)


@pytest.fixture
def note_error(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Call it with (kind, error); the largest of each kind is printed after the run."""
    return lambda kind, error: _note(kind, float(error), request.node.name)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under ``-n`` tests run in processes of their own, and another one prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["largest errors"] = _WORST


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    for kind, (largest, test) in getattr(node, "workeroutput", {}).get("largest errors", {}).items():
        _note(kind, largest, test)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _WORST:
        terminalreporter.section("largest errors against one process")
        for kind, (error, name) in sorted(_WORST.items()):
            terminalreporter.write_line(f"{kind:24} {error:.2e}  {name}")


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tables that tests find are kept for this run alone; child processes inherit the folder.

    Runs without a strategy find a measurement of this machine there (made up: only tests/measure measures).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for processes in range(2, 9):
            threads = str(max(1, available_cores() // processes))
            for environ in ({**os.environ}, {**os.environ, "OMP_NUM_THREADS": threads}):
                keep(made_samples(processes), environ)
        yield
