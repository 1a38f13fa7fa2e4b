"""What must be the same for a checkpoint to be gone on from, and what can be known of a checkpoint without torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import (
    CHECKPOINTS,
    UNFINISHED,
    complete_checkpoints,
    is_unlisted,
    passed_over,
    read_manifest,
    saved_state,
    step_of,
)
from shardwise.errors import CheckpointError
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig
from shardwise.train.previous import is_set_aside
from shardwise.units import format_exact


@dataclass(frozen=True)
class RunIdentity:
    """What must be the same for a checkpoint to be gone on from."""

    model: str
    optimizer: str
    data: str
    lora: str = "none"

    def check(self, saved: dict[str, str], checkpoint: Path, names: Collection[str] = ()) -> None:
        """Refuse a checkpoint of another run, by the name of what differs; ``names``: look at these alone.

        Raises:
            CheckpointError: something differs.
        """
        for name, value in asdict(self).items():
            before = saved.get(name, "none" if name == "lora" else None)
            if before != value and (not names or name in names):
                raise CheckpointError(
                    f"resume from {checkpoint}",
                    f"its {name} is {before}, that of this run {value}",
                    f"Resume with the same {name}, or start anew with resume=no in another output_dir",
                )


def resumable(run: RunConfig, folder: Path) -> list[Path]:
    """The checkpoints that ``resume`` may mean, the first choice first: the complete ones in ``folder`` from the newest
    on, or the one given; none to start."""
    if run.resume == "no":
        return []
    if run.resume == "auto":
        return complete_checkpoints(folder)[::-1]
    return [Path(run.resume).resolve()]  # LATEST and BEST are links


def chosen_checkpoint(run: RunConfig, folder: Path) -> Path | None:
    """The first choice of :func:`resumable`, None to start."""
    return next(iter(resumable(run, folder)), None)


def after_restart(run: RunConfig, output_dir: Path) -> RunConfig:
    """The run as it goes on after a failure: from its newest checkpoint, or as it began if it has made none.

    Results that are still set aside say that it has not made a step, so that checkpoints may be another run's. So may
    one that is not beyond the checkpoint that ``resume`` names, whose branch was set aside when this one began.
    """
    if is_set_aside(output_dir):
        return run
    newest = next(iter(complete_checkpoints(output_dir / CHECKPOINTS)[::-1]), None)
    if newest is None or (run.resume not in ("no", "auto") and (step_of(newest) or 0) <= _step_named(run.resume)):
        return run
    return run.model_copy(update={"resume": "auto", "overwrite": False})


def begun_again(run: RunConfig, output_dir: Path) -> RunConfig:
    """The run of a script that begins again after a failure, made from what the script says: :func:`after_restart`, and
    what lies there is its own and not to be overwritten."""
    return after_restart(run, output_dir).model_copy(update={"overwrite": False})


def _step_named(resume: str) -> int:
    """The step of the checkpoint that ``resume`` names; -1 where it has gone."""
    checkpoint = Path(resume).resolve()
    try:
        if is_unlisted(checkpoint):
            return int(saved_state(checkpoint)["train"]["step"])
        return read_manifest(checkpoint)[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
        return -1


def refuse_damaged(run: RunConfig, notes: list[str]) -> None:
    """Refuse to start where there is no whole checkpoint but damaged ones: from step 0 the metrics would be cut.

    Args:
        notes: a line for each folder that was passed over; saves that came to no end are no reason.

    Raises:
        CheckpointError: with those that are damaged, and why.
    """
    damaged = [note for note in notes if not note.endswith(UNFINISHED)]
    if damaged:
        remedy = "Name a checkpoint that can be read, or start anew with resume=no and overwrite=true"
        raise CheckpointError(f"resume = {run.resume!r}", f"no checkpoint is whole ({'; '.join(damaged)})", remedy)


def check_resume(run: RunConfig, plan: Plan, folder: Path) -> None:
    """Refuse to go on from a checkpoint that is incomplete, or of another model, optimizer or kind of adapters.

    That the data are the same shows when they are read.

    Raises:
        CheckpointError: the reason.
    """
    checkpoint = chosen_checkpoint(run, folder)
    if checkpoint is None:
        if run.resume == "auto":
            refuse_damaged(run, passed_over(folder, None))
        return
    saved: dict[str, str] = saved_state(checkpoint)["identity"]
    lora = f"r {run.lora.r}, alpha {format_exact(run.lora.alpha)}" if run.lora is not None else "none"
    if run.lora is not None and saved.get("lora", "none").startswith(f"{lora} on "):
        lora = saved["lora"]  # on which modules is known when the model has been built
    identity = RunIdentity(plan.model.hash, run.train.optimizer, saved.get("data", ""), lora)
    identity.check(saved, checkpoint)


def check_order(saved: dict[str, Any], run: RunConfig, checkpoint: Path) -> None:
    """Refuse to go on in the middle of an epoch in another order: some of its rows would come twice, others never.

    Args:
        saved: the state that the checkpoint holds.

    Raises:
        CheckpointError: the key that differs.
    """
    if not saved["train"]["loader"]["rows_seen"]:
        return
    before, now = saved["run"], run.model_dump(mode="json")
    orders = []
    for tree in (before, now):
        data, seed = tree["data"], tree["train"]["seed"]
        order = {"data.shuffle": data["shuffle"], "data.group_by_length": data.get("group_by_length", False)}
        if data["shuffle"]:
            order["data.seed"] = seed if data["seed"] is None else data["seed"]
        if order["data.group_by_length"]:  # by the lengths that are left after the cut
            order |= {"data.max_length": data["max_length"], "data.on_long": data["on_long"]}
        orders.append(order)
    for key, value in orders[0].items():
        if orders[1].get(key) != value:
            shown, other = ("null" if one is None else str(one).lower() for one in (value, orders[1].get(key)))
            rule = f"it stands in the middle of an epoch in the order of {key} = {shown}, that of this run is {other}"
            raise CheckpointError(f"resume from {checkpoint}", rule, f"Use {key}={shown}, or start anew with resume=no")
