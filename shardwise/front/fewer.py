"""The plan of a run that goes on with fewer devices than it had."""

from __future__ import annotations

from pathlib import Path

from shardwise.config import load_yaml
from shardwise.errors import ShardwiseError
from shardwise.front.resolve import prepare
from shardwise.spec.filled import without_stale
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig
from shardwise.train.identity import after_restart

_MOST_TRIES = 64


def on_fewer_devices(folder: Path, left: int, machines: int) -> tuple[RunConfig, Plan]:
    """The run of an output folder on as many devices as fit what was given of its strategy, with the batch that it
    has, and as many on each machine.

    Args:
        left: devices of all machines together, at most; a multiple of ``machines``.

    Raises:
        ShardwiseError: no number of them can run it; what is wrong with the most.
    """
    tree = load_yaml(folder / "run.yaml")
    rows = tree["train"]["global_batch_size"]
    after = after_restart(parse_run(tree), folder)
    resume = "auto" if after.resume == "no" else after.resume  # without a checkpoint, both begin anew
    tree = without_stale(tree, ["devices"]) | {"resume": resume, "overwrite": False}
    tree["train"] = tree["train"] | {"global_batch_size": rows}
    refusals = []
    for devices in range(left, 0, -machines)[:_MOST_TRIES]:
        try:
            return prepare(tree | {"devices": devices}, own_output=True)
        except ShardwiseError as error:
            refusals.append(error)
    raise refusals[0]
