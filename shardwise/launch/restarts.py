"""Starting a job again after a failure: what can be tried once more, and with which devices. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.config import load_yaml
from shardwise.errors import ShardwiseError
from shardwise.launch.resolve import count_devices, prepare, write_run
from shardwise.launch.script import Script
from shardwise.log import say
from shardwise.spec.filled import without_stale
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig
from shardwise.train.context import Restart
from shardwise.train.identity import after_restart
from shardwise.train.previous import is_set_aside

if TYPE_CHECKING:
    from shardwise.launch.agent import Outcome, Work

_MOST_TRIES = 64
Attempt = Callable[["Work", Restart | None], "Outcome"]


def run_with_restarts(work: Work, attempt: Attempt, interrupted: Callable[[], bool]) -> Outcome:
    """Attempts until one ends otherwise than by a failure, or ``restarts`` of the run are used up.

    Args:
        attempt: runs the workers once; told of the failure before it, None the first time.
        interrupted: whether the user wants to leave.
    """
    restart: Restart | None = None
    while True:
        outcome = attempt(work, restart)
        number, allowed = (restart.number if restart else 0) + 1, allowed_restarts(work)
        if not outcome.may_restart or interrupted() or number > allowed:
            return outcome
        failure = str(outcome.changes["error"])
        say(f"{failure}; restart {number} of {allowed}")
        restart = Restart(number, allowed, outcome.failed_at, failure)
        for path in work.folder.glob("logs/error-rank-*.json"):
            path.unlink()
        try:
            work = with_devices_left(work)
        except ShardwiseError as error:
            return replace(outcome, message=f"{outcome.message}\nno restart: {error}")


def allowed_restarts(work: Work) -> int:
    """``restarts`` of the run; 0 for a script or a check, which have none."""
    path = work.folder / "run.yaml"
    if isinstance(work.target, Script) or not path.exists():
        return 0
    return int(load_yaml(path).get("restarts") or 0)


def with_devices_left(work: Work) -> Work:
    """The work on the devices that are still there: planned anew where they are fewer.

    Raises:
        ShardwiseError: what was given of the strategy fits no number of them.
    """
    left = devices_left(work)
    if left >= work.devices or is_set_aside(work.folder):
        return work
    run, plan = _most_devices(work, left)
    say(f"{left} of {work.devices} devices are left; the run goes on on {plan.devices}")
    write_run(run, plan)
    return replace(work, devices=plan.devices)


def _most_devices(work: Work, left: int) -> tuple[RunConfig, Plan]:
    """The run on as many devices as fit what was given of its strategy, with the batch that it has."""
    tree = load_yaml(work.folder / "run.yaml")
    rows = tree["train"]["global_batch_size"]
    after = after_restart(parse_run(tree), work.folder)
    resume = "auto" if after.resume == "no" else after.resume  # without a checkpoint, both begin anew
    tree = without_stale(tree, ["devices"]) | {"resume": resume, "overwrite": False}
    tree["train"] = tree["train"] | {"global_batch_size": rows}
    refusals = []
    for devices in range(left, max(0, left - _MOST_TRIES), -1):
        try:
            return prepare(tree | {"devices": devices}, own_output=True)
        except ShardwiseError as error:
            refusals.append(error)
    raise refusals[0]


def devices_left(work: Work) -> int:
    """How many of the devices that a job has used are there; a CPU has as many as it is asked for."""
    device: Any = json.loads((work.folder / "plan.json").read_text(encoding="utf-8"))["device_type"]
    return work.devices if device == "cpu" else min(work.devices, count_devices(device))
