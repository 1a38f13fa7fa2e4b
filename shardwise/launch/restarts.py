"""Starting a job again after a failure: what can be tried once more, and with which devices. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.config import load_yaml
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch.alive import Alive, alive_devices
from shardwise.launch.machines import WOULD_GO_ON
from shardwise.launch.nodes import local_processes
from shardwise.launch.resolve import count_devices, prepare, write_run
from shardwise.launch.script import Script
from shardwise.log import say
from shardwise.spec.filled import without_stale
from shardwise.spec.plan import DeviceType, Plan
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
        restart, refusal = _following(work, outcome, (restart.number if restart else 0) + 1, interrupted)
        if restart is None:
            return replace(outcome, message=f"{outcome.message}\nno restart: {refusal}") if refusal else outcome
        say(f"{restart.failure}; restart {restart.number} of {restart.allowed}")
        try:
            work = with_devices_left(work)
        except ShardwiseError as error:
            return replace(outcome, message=f"{outcome.message}\nno restart: {error}")


def _following(
    work: Work, outcome: Outcome, number: int, interrupted: Callable[[], bool]
) -> tuple[Restart | None, str]:
    """The restart that comes after an attempt, with this number, None for none; and why there is none, where the
    outcome does not say so."""
    if outcome.changes["state"] in ("done", "stopped"):
        return None, ""
    allowed, wanted = allowed_restarts(work), outcome.may_restart and not interrupted()
    own = Restart(number, allowed, outcome.failed_at, str(outcome.changes["error"]))
    following = own if wanted and number <= allowed else None
    if work.nodes.count == 1:
        if following is not None:
            _clear(work)
        return following, ""
    word = _lost_here(work) if wanted else "it would only fail again"
    return work.machines.agree(work.nodes, number - 1, following, word, lambda: _clear(work))


def _clear(work: Work) -> None:
    """Remove what ranks and machines have left of their failure."""
    for path in (*work.folder.glob("logs/error-rank-*.json"), *work.folder.glob("logs/deaths-machine-*.json")):
        path.unlink(missing_ok=True)


def allowed_restarts(work: Work) -> int:
    """``restarts`` of the run; of a script whose Trainer has not begun what the command line says. A check has none."""
    path = work.folder / "run.yaml"
    return int(load_yaml(path).get("restarts") or 0) if path.exists() else work.restarts


def with_devices_left(work: Work) -> Work:
    """The work on the devices that are still there: planned anew where they are fewer.

    Over several machines, and of a script, it is tried on as many as before: that they are there has been seen to for
    the former, and the latter may count on their number.

    Raises:
        ShardwiseError: there are too few of them.
    """
    alive = living_devices(work)
    if alive is None:
        return work
    if alive.lost or len(alive.names) < local_processes(work.devices, work.nodes):
        work = replace(work, variables=alive.variables())
    if work.nodes.count > 1:
        return work
    left = len(alive.names)
    if left >= work.devices:
        return work
    if not left or isinstance(work.target, Script):
        rule = "a script is started again on as many as before, on which it may count" if left else "none can go on"
        raise LaunchError(f"{left} of {work.devices} devices are left", rule, "Start it anew, with resume=auto")
    if is_set_aside(work.folder):
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


def living_devices(work: Work) -> Alive | None:
    """The devices of this machine that a job may use and that still answer; None on a CPU, which has as many as it is
    asked for."""
    device = _device_type(work)
    if device == "cpu":
        return None
    return alive_devices(device, os.environ) or Alive(device, tuple(map(str, range(count_devices(device)))))


def _device_type(work: Work) -> DeviceType:
    path = work.folder / "plan.json"
    if not path.exists():  # of a script whose Trainer has not begun nothing is known
        return "cpu"
    device: DeviceType = json.loads(path.read_text(encoding="utf-8"))["device_type"]
    return device


def _lost_here(work: Work) -> str:
    """What keeps this one of several machines from beginning again; ``WOULD_GO_ON`` if nothing does."""
    alive, needed = living_devices(work), local_processes(work.devices, work.nodes)
    if alive is None or len(alive.names) >= needed:
        return WOULD_GO_ON
    return f"{len(alive.names)} of {needed} devices are left, and only jobs on one machine are planned anew for fewer"
