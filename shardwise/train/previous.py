"""Results that a starting run replaces: kept aside until its first step is made, put back if it makes none.

Whatever ends a run before (a wrong row, a missing tensor, a kill) so leaves the folder as it was. Imports no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.callbacks import Callback, RunInfo

# What a run writes into its folder; `overwrite` replaces these, and what :func:`results_in` finds, and nothing else.
RESULTS = (
    *("run.yaml", "plan.json", "metrics.jsonl", "status.json", "logs", "checkpoints", "export", "report.html"),
    *("profile", "tensorboard", "wandb", "swanlab", "mlflow.db"),
)
_METRICS = "*_results.json"  # of a script's save_metrics()
# What a resumed run writes anew at its start.
HEADER = ("run.yaml", "plan.json", "status.json")

# A folder under its full name is complete, and the results beside it are those of an attempt. Under the draft's name
# it is on its way, in either direction: what it holds belongs back, and nothing beside it may be removed.
_FOLDER, _DRAFT = ".previous", ".previous.part"
_NAMES = "names.json"


def results_in(output_dir: Path) -> list[str]:
    """The names in a folder that a run may have written there, whether they are there or not."""
    return [*RESULTS, *sorted(path.name for path in output_dir.glob(_METRICS))]


def set_aside(output_dir: Path, names: Sequence[str]) -> None:
    """Move the results of these names aside, all or none.

    Raises:
        ConfigError: the system does not move one of them.
    """
    found = [name for name in names if (output_dir / name).exists() or (output_dir / name).is_symlink()]
    if not found:
        return
    draft = output_dir / _DRAFT
    draft.mkdir()
    try:
        for name in found:
            (output_dir / name).rename(draft / name)
        (draft / _NAMES).write_text(json.dumps(list(names)), encoding="utf-8")
        draft.rename(output_dir / _FOLDER)
    except OSError as error:
        put_back(output_dir)
        rule = f"the results of the earlier run cannot be moved aside ({error.strerror}: {error.filename})"
        raise ConfigError(f"output_dir = {str(output_dir)!r}", rule, "Remove them, or name another folder") from None


def put_back(output_dir: Path) -> bool:
    """Put back what an attempt without a step has set aside, in place of the attempt's own; False if there is nothing.

    The attempt's logs stay, behind the earlier ones.
    """
    folder, draft = output_dir / _FOLDER, output_dir / _DRAFT
    if folder.exists():
        for name in json.loads((folder / _NAMES).read_text(encoding="utf-8")):
            if name != "logs":
                _remove(output_dir / name)
        folder.rename(draft)
    if not draft.exists():
        return False
    for path in [path for path in draft.iterdir() if path.name != _NAMES]:
        if path.name == "logs" and (output_dir / "logs").is_dir():
            _join_logs(path, output_dir / "logs")
        else:
            path.rename(output_dir / path.name)
    shutil.rmtree(draft)
    return True


def discard(output_dir: Path) -> None:
    """Delete what was set aside."""
    _remove(output_dir / _FOLDER)


def is_set_aside(output_dir: Path) -> bool:
    """Whether results of an earlier run wait for this one's first step, or are on their way there or back."""
    return any((output_dir / name).exists() for name in (_FOLDER, _DRAFT))


def checkpoints_now(output_dir: Path) -> Path:
    """The folder of the checkpoints that :func:`put_back` would leave."""
    places = [output_dir / name / "checkpoints" for name in (_FOLDER, _DRAFT)]
    return next((place for place in places if place.is_dir()), output_dir / "checkpoints")


class ReplacesPrevious(Callback):
    """With its first step a run has replaced the one before it.

    One that was told to overwrite has done so with an evaluation, too. One that only evaluates what it goes on from
    leaves the header of the run that it found.
    """

    main_only = True
    may_stop = False

    def on_train_begin(self, info: RunInfo) -> None:
        self._folder, self._overwrites = info.output_dir, info.run.overwrite

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        discard(self._folder)

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        if self._overwrites:
            discard(self._folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _join_logs(earlier: Path, logs: Path) -> None:
    """Move logs in ``earlier`` to ``logs``, each in front of the one of its name there."""
    for path in earlier.iterdir():
        later = logs / path.name
        if not later.exists():
            path.rename(later)
        elif path.suffix == ".log":
            with later.open("rb") as source, path.open("ab") as target:
                shutil.copyfileobj(source, target)
            path.replace(later)
