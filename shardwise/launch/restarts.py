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
from shardwise.launch.devices import count_devices
from shardwise.launch.machines import Agreement, Word
from shardwise.launch.nodes import local_processes
from shardwise.launch.output import write_run
from shardwise.log import say
from shardwise.spec.plan import DeviceType
from shardwise.train.context import Restart
from shardwise.train.previous import is_set_aside

if TYPE_CHECKING:
    from shardwise.launch.agent import Outcome, Work

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
        failed = (restart.number if restart else 0) if outcome.follows is None else outcome.follows
        agreed = _following(work, outcome, failed + 1, interrupted)
        restart, refusal = agreed.restart, agreed.refusal
        if restart is None:
            return replace(outcome, message=f"{outcome.message}\nno restart: {refusal}") if refusal else outcome
        say(f"{restart.failure}; restart {restart.number} of {restart.allowed}")
        try:
            work = with_devices_left(replace(work, devices=agreed.devices))
        except ShardwiseError as error:
            return replace(outcome, message=f"{outcome.message}\nno restart: {error}")


def _following(work: Work, outcome: Outcome, number: int, interrupted: Callable[[], bool]) -> Agreement:
    """What comes after an attempt: the restart with this number, or none."""
    if outcome.changes["state"] in ("done", "stopped"):
        return Agreement()
    allowed, wanted = allowed_restarts(work), outcome.may_restart and not interrupted()
    own = Restart(number, allowed, outcome.failed_at, str(outcome.changes["error"]))
    following = own if wanted and number <= allowed else None
    if work.nodes.count == 1:
        if following is not None:
            _clear(work)
        return Agreement(following, work.devices)
    word = _word(work) if wanted else Word("it would only fail again")

    def begin(left: int | None) -> int:
        devices = work.devices if left is None else planned_for(work, left * work.nodes.count).devices
        _clear(work)
        return devices

    agreed = work.machines.agree(work.nodes, number - 1, following, word, begin)
    return replace(agreed, refusal=word.refusal) if wanted and word.refusal else agreed


def _clear(work: Work) -> None:
    """Remove what ranks and machines have left of their failure."""
    for path in (*work.folder.glob("logs/error-rank-*.json"), *work.folder.glob("logs/deaths-machine-*.json")):
        path.unlink(missing_ok=True)


def allowed_restarts(work: Work) -> int:
    """``restarts`` of the run; of a script whose Trainer has not begun what the command line says. A check has none."""
    path = work.folder / "run.yaml"
    return int(load_yaml(path).get("restarts") or 0) if path.exists() else work.restarts


def with_devices_left(work: Work) -> Work:
    """The work on the devices that are still there: planned anew where they are fewer, on one machine. Several have
    agreed on their number before.

    Raises:
        ShardwiseError: there are too few of them.
    """
    alive = living_devices(work)
    if alive is None:
        return work
    if alive.lost or len(alive.names) < local_processes(work.devices, work.nodes):
        work = replace(work, variables=alive.variables())
    if work.nodes.count > 1 or len(alive.names) >= work.devices:
        return work
    return planned_for(work, len(alive.names))


def planned_for(work: Work, left: int) -> Work:
    """The work on at most ``left`` devices of all machines together, which are fewer than it had.

    A script is tried on as many as before alone, on which it may count; so is a run that has made no step.

    Raises:
        ShardwiseError: they are too few.
    """
    if not left or work.replan is None:
        rule = "a script is started again on as many as before, on which it may count" if left else "none can go on"
        raise LaunchError(f"{left} of {work.devices} devices are left", rule, "Start it anew, with resume=auto")
    if is_set_aside(work.folder):
        if work.nodes.count > 1:  # one of them would start more processes than it has devices
            rule = "the run has made no step, so that it could only begin on as many as before"
            raise LaunchError(f"{left} of {work.devices} devices are left", rule, "Start it anew")
        return work
    run, plan = work.replan(work.folder, left, work.nodes.count)
    say(f"{left} of {work.devices} devices are left; the run goes on on {plan.devices}")
    write_run(run, plan)
    return replace(work, devices=plan.devices)


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


def _word(work: Work) -> Word:
    """What this one of several machines says of its devices."""
    alive, needed = living_devices(work), local_processes(work.devices, work.nodes)
    if alive is None or len(alive.names) >= needed:
        return Word()
    return Word(left=len(alive.names)) if alive.names else Word(f"none of the {needed} devices of this machine is left")
