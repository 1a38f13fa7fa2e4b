"""``Trainer(check=True)``: the check runs once, in the process that is about to start the job."""

from __future__ import annotations

import os
import sys
from typing import Any

from shardwise.errors import ConfigError, DifferenceError
from shardwise.launch.place import current_place


def check_before_start(tree: dict[str, Any]) -> None:
    """Prove the plan of a run on a small copy of its model; in a worker of ours that has been done.

    Raises:
        DifferenceError: the plan's numbers are not those of one process.
        ConfigError, PlanError: what cannot run; or another launcher has started the job already.
        SystemExit: the check itself failed, or was stopped; the reason has been shown.
    """
    place = current_place(os.environ)
    if place is not None:
        if place.ours:
            return
        rule = "runs before a job starts, and another launcher has started this one"
        raise ConfigError("Trainer(check=True)", rule, "Leave it out, and use: shardwise check run.yaml")
    from shardwise.front.checking import run_check
    from shardwise.report.checking import show_check
    from shardwise.report.results import messages_console

    result = run_check(tree)
    if result.report is None:
        sys.exit(result.exit_code)
    show_check(result.report, messages_console())
    difference = result.report["first_difference"]
    if difference is not None:
        rule = f"on a small copy of the model the plan differs from one process, first in {difference['module']}"
        raise DifferenceError("Trainer(check=True)", rule, "Use another strategy, and report this one")
