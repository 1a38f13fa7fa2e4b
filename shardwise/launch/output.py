"""The output folder of a run: what may lie in it, what ``overwrite`` may replace, and what the workers read of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.files import is_draft, remove_drafts, replace_text
from shardwise.launch.lock import claim
from shardwise.launch.place import Nodes
from shardwise.spec.keys import get
from shardwise.spec.paths import is_path, local_path
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, data_paths, dump_run
from shardwise.train.previous import HEADER, put_back, results_in, set_aside

# What a run leaves that was refused before its first step: nothing that another run would have to spare.
_TRACES = frozenset([".lock", "status.json", "run.yaml", "plan.json", "logs"])
_FIRST_TRACES = frozenset([".lock", "logs"])  # another machine of the same job may have been faster
_INPUT_KEYS = ("tokenizer", "chat_template")


def check_output(run: RunConfig, model_folder: Path, nodes: Nodes | None = None) -> None:
    """Refuse an output folder whose content would be mixed with this run's, or lost; on machine 0, which makes it.

    Raises:
        ConfigError: a file in its place, no right to write, results of another run, a checkpoint to
            resume from that is not there, or ``overwrite`` of a folder with the run's own inputs.
    """
    output = local_path(run.output_dir)
    value = f"output_dir = {run.output_dir!r}"
    from_folder = run.resume not in ("no", "auto")
    if from_folder and not local_path(run.resume).is_dir():
        raise ConfigError(f"resume = {run.resume!r}", "no such checkpoint folder", "Use resume=auto, no or a folder")
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigError(value, f"{existing} is a file", "Name another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(value, f"no right to write in {existing}", "Name another folder")
    if nodes and nodes.rank:
        return
    if run.overwrite:
        _check_is_ours(output)
        _check_no_input_inside(run, output, model_folder)
        return
    elsewhere = from_folder and not local_path(run.resume).resolve().is_relative_to(output.resolve())
    if (run.resume == "no" or elsewhere) and _holds_results(output):
        other = f", and resume = {run.resume!r} is of another run" if elsewhere else ""
        remedy = "Use resume=auto to go on, overwrite=true to start anew, or another folder"
        raise ConfigError(value, f"is not empty{other}", "Name another folder" if elsewhere else remedy)


def _check_is_ours(output: Path) -> None:
    """``overwrite`` in a folder that no run has written, such as a project's own, would delete foreign files.

    A ``logs`` alone stays: it may also be that of another machine of this job.
    """
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    lost = ", ".join(sorted(names & set(results_in(output)) - _FIRST_TRACES))
    if lost and not _is_ours(output):
        rule = f"overwrite would delete {lost} in it, and no run has left its status.json or plan.json there"
        raise ConfigError(f"output_dir = {str(output)!r}", rule, "Name another folder, or remove them by hand")


def _check_no_input_inside(run: RunConfig, output: Path, model_folder: Path) -> None:
    inputs = [("model", str(model_folder)), *((key, get(run, key)) for key in _INPUT_KEYS), *data_paths(run)]
    for key, name in inputs:
        if name is None or not is_path(name):  # a chat template may be its own text
            continue
        path, value = local_path(name).resolve(), f"output_dir = {run.output_dir!r}"
        for result in results_in(output):
            if path.is_relative_to((output / result).resolve()):
                rule = f"overwrite would delete {key} = {name!r}, which lies in its {result}"
                raise ConfigError(value, rule, "Name another output folder")


def _holds_results(output: Path) -> bool:
    """A folder in which a run was refused before it began counts as empty; one that has no status is not ours."""
    names = {path.name for path in output.iterdir() if not is_draft(path.name)} if output.is_dir() else set()
    return not names <= (_TRACES if "status.json" in names else _FIRST_TRACES)


def _is_ours(output: Path) -> bool:
    return any((output / name).exists() for name in ("status.json", "plan.json"))


def write_run(run: RunConfig, plan: Plan, *, goes_on: bool = False, begin: Callable[[], None] = lambda: None) -> Path:
    """Claim the output folder and write what the workers read, ``run.yaml`` and ``plan.json``; its path.

    What they replace is set aside until the run has made a step, unless it is the run's own, which ``goes_on``.
    ``begin`` is called between the two: nothing of another run lies there any more, and nothing of this one yet.

    Raises:
        ConfigError: another run is at work in the folder, or it cannot be written to.
    """
    output_dir = local_path(run.output_dir)
    claim(output_dir)
    remove_drafts(output_dir)
    if not goes_on:
        put_back(output_dir)  # of an attempt that was killed
        set_aside(output_dir, results_in(output_dir) if run.overwrite and _is_ours(output_dir) else HEADER)
    begin()
    try:
        replace_text(output_dir / "run.yaml", dump_run(run))
        plan.save(output_dir / "plan.json")
    except OSError as error:
        put_back(output_dir)
        rule = f"cannot be written to ({error.strerror})"
        raise ConfigError(f"output_dir = {run.output_dir!r}", rule, "Make room, or name another folder") from None
    return output_dir
