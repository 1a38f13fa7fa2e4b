"""Where messages go: one line on stderr for the user, a file for the engine's own talk."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def say(message: str) -> None:
    """Show a message to the user, on stderr: stdout is kept for results. A reader that has gone misses it."""
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


@contextmanager
def loggers_to_file(names: tuple[str, ...], path: Path) -> Iterator[None]:
    """Send the records of some loggers, and Python warnings, to a file only while the block runs.

    Args:
        names: top-level logger names (``"torch"``); loggers below them are included.
        path: the file; what it holds is kept.
    """
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    roots = [logging.getLogger(name) for name in (*names, "py.warnings")]
    existing = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    below = [item for item in existing if item.name.startswith(tuple(f"{name}." for name in names))]
    before = [(item, item.handlers, item.propagate) for item in (*roots, *below)]
    for item in below:
        item.handlers, item.propagate = [], True
    for item in roots:
        item.handlers, item.propagate = [handler], False
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for item, handlers, propagate in before:
            item.handlers, item.propagate = handlers, propagate
        handler.close()
