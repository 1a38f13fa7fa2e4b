"""What must be the same for a checkpoint to be gone on from, and what can be known of a checkpoint without torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import complete_checkpoints, saved_state
from shardwise.errors import CheckpointError
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig


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


def chosen_checkpoint(run: RunConfig, folder: Path) -> Path | None:
    """The checkpoint that ``resume`` means: the newest complete one in ``folder``, the one given, or None to start."""
    if run.resume == "no":
        return None
    if run.resume == "auto":
        return next(iter(reversed(complete_checkpoints(folder))), None)
    return Path(run.resume)


def check_resume(run: RunConfig, plan: Plan, folder: Path) -> None:
    """Refuse to go on from a checkpoint that is incomplete, or of another model, optimizer or kind of adapters.

    That the data are the same shows when they are read.

    Raises:
        CheckpointError: the reason.
    """
    checkpoint = chosen_checkpoint(run, folder)
    if checkpoint is None:
        return
    saved: dict[str, str] = saved_state(checkpoint)["identity"]
    lora = f"r {run.lora.r}, alpha {run.lora.alpha:g}" if run.lora is not None else "none"
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
        orders.append(order)
    for key, value in orders[0].items():
        if orders[1].get(key) != value:
            shown, other = str(value).lower(), str(orders[1].get(key)).lower()
            rule = f"it stands in the middle of an epoch in the order of {key} = {shown}, that of this run is {other}"
            raise CheckpointError(f"resume from {checkpoint}", rule, f"Use {key}={shown}, or start anew with resume=no")
