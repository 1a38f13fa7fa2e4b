"""A training job whose ranks are killed again and again, against the same job left alone.

    python -m benchmarks.faults --kills 100

A tiny random model on four ranks (tensor x data) saves every three steps; the launcher starts it again after each kill
(``restarts``). Each kill is a SIGKILL of one rank by itself, at a chosen point of the start, of a step, of a save or of
its publishing. At the end both jobs must have exported the same bits, and no checkpoint may be damaged.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.startup import CONFIG, lay_out

if TYPE_CHECKING:
    from shardwise.train.context import WorkerContext

NUM_RANKS = 4
SAVE_STEPS = 3
ROWS = 24
# Where a rank dies, by part of the job; those of rank 0 alone are marked.
POINTS = {
    "start-up": ("before the model", "after the model", "before the first step"),
    "step": ("at its begin", "inside it", "at its end"),
    "save": ("before the plan", "before the write", "inside the write", "after the write"),
    "publish": ("before the lists*", "before the name*", "after the name*", "between the links*", "in the rotation*"),
}
_PLAN, _DONE = "kills.json", "kills-done.jsonl"
_INSIDE_SECONDS = 0.004  # into a step, or into a write, at most


@dataclass(frozen=True)
class Kill:
    """One death: of ``rank``, at ``point`` of ``part``, in the first step from ``step`` on that comes by there."""

    part: str
    point: str
    rank: int
    step: int


@dataclass(frozen=True)
class Outcome:
    """What came of a job with kills."""

    kills: dict[str, int]
    restarts: int
    steps: int
    steps_lost: float
    restart_seconds: float
    damaged: int
    equal: bool

    def holds(self, number: int) -> bool:
        """Whether as many ranks were killed as planned, each kill cost one restart, and nothing came to harm."""
        return sum(self.kills.values()) == self.restarts == number and self.equal and not self.damaged

    def lines(self) -> list[str]:
        parts = ", ".join(f"{count} in {part}" for part, count in self.kills.items())
        return [
            f"kills      {sum(self.kills.values())}: {parts}",
            f"restarts   {self.restarts}, over {self.steps} steps",
            f"steps lost {self.steps_lost:.2f} a kill on average",
            f"back       {self.restart_seconds:.2f} s from a kill to the end of the next step (median)",
            f"corrupt    {self.damaged} checkpoints",
            f"weights    {'bit-equal to' if self.equal else 'DIFFERENT FROM'} those of the job left alone",
        ]


def plan_kills(number: int, steps: int, seed: int = 0) -> list[Kill]:
    """Kills over the whole run, the parts in turn and each part's points in turn."""
    generator = random.Random(seed)
    used = dict.fromkeys(POINTS, 0)
    kills = []
    for index in range(number):
        part = list(POINTS)[index % len(POINTS)]
        point = POINTS[part][used[part] % len(POINTS[part])]
        used[part] += 1
        rank = 0 if point.endswith("*") else generator.randrange(NUM_RANKS)
        # Early enough that a save still comes behind the last one.
        kills.append(Kill(part, point.rstrip("*"), rank, 1 + index * (steps - SAVE_STEPS - 1) // number))
    return kills


class Fate:
    """The next kill of this start, in the rank that it is for.

    It is noted before the rank dies, so that the next start has the kill behind it.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._folder, self._rank = context.output_dir, context.rank
        kills = [Kill(**each) for each in json.loads((self._folder / _PLAN).read_text(encoding="utf-8"))]
        done = self._folder / _DONE
        number = len(done.read_text(encoding="utf-8").splitlines()) if done.exists() else 0
        self.kill = kills[number] if number < len(kills) else None
        self.step = self.made = 0  # the step that was begun last, the steps that are done

    def is_at(self, part: str, point: str) -> bool:
        """Whether this is where the rank dies."""
        kill = self.kill
        if kill is None or (kill.part, kill.point, kill.rank) != (part, point, self._rank):
            return False
        return part == "start-up" or self.step >= kill.step

    def pass_by(self, part: str, point: str, seconds: float = 0.0) -> None:
        """Die here, or some time later, if it is here."""
        if not self.is_at(part, point):
            return
        if seconds:
            threading.Timer(random.Random(self.step).uniform(0, seconds), self.die).start()
        else:
            self.die()

    def die(self) -> None:
        from shardwise.checkpoint.listing import CHECKPOINTS, complete_checkpoints, step_of

        assert self.kill is not None
        saved = [step_of(path) for path in complete_checkpoints(self._folder / CHECKPOINTS)]
        note = asdict(self.kill) | {"made": self.made, "saved": saved[-1] if saved else 0}
        with (self._folder / _DONE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.kill(os.getpid(), signal.SIGKILL)


def _around(fate: Fate, function: Any, part: str, before: str, after: str = "", inside: str = "") -> Any:
    """``function`` with traps of these points before it, behind it and while it runs."""

    def call(*arguments: Any, **options: Any) -> Any:
        fate.pass_by(part, before)
        fate.pass_by(part, inside, _INSIDE_SECONDS)
        result = function(*arguments, **options)
        fate.pass_by(part, after)
        return result

    return call


def train_and_die(context: WorkerContext) -> dict[str, Any]:
    """A worker of the job, with the traps of its next kill set."""
    from types import SimpleNamespace
    from unittest.mock import patch

    from shardwise.checkpoint import save_job, shelf
    from shardwise.train import worker
    from shardwise.train.callbacks import Callback, RunInfo

    fate = Fate(context)

    class Traps(Callback):
        may_stop = False

        def on_train_begin(self, info: RunInfo) -> None:
            fate.step = fate.made = info.first_step
            fate.pass_by("start-up", "before the first step")

        def on_step_begin(self, step: int) -> None:
            fate.step = step
            fate.pass_by("step", "at its begin")
            fate.pass_by("step", "inside it", _INSIDE_SECONDS)

        def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
            fate.made = step
            fate.pass_by("step", "at its end")

    around = functools.partial(_around, fate)

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:  # it has lost its name, and not yet its files; what is swept passes by
            fate.pass_by("publish", "in the rotation")
        shutil.rmtree(path, ignore_errors=ignore_errors)

    job = save_job.SaveJob
    traps = [
        patch.object(
            worker, "load_model", around(worker.load_model, "start-up", "before the model", "after the model")
        ),
        patch.object(save_job, "_make_plan", around(save_job._make_plan, "save", "before the plan")),
        patch.object(
            job,
            "_write_own_files",
            around(job._write_own_files, "save", "before the write", "after the write", "inside the write"),
        ),
        patch.object(job, "_give_name", around(job._give_name, "publish", "before the lists", "after the name")),
        patch.object(save_job, "_sync_folder", around(save_job._sync_folder, "publish", "before the name")),
        patch.object(shelf, "os", SimpleNamespace(replace=around(os.replace, "publish", "between the links"))),
        patch.object(shelf, "shutil", SimpleNamespace(rmtree=rmtree, disk_usage=shutil.disk_usage)),
    ]
    for trap in traps:
        trap.start()
    try:
        return worker.train(context, [Traps()])
    finally:
        for trap in traps:
            trap.stop()


def prepare_job(folder: Path, name: str, steps: int, kills: list[Kill], background: bool) -> Path:
    """Model, rows, and an output folder of this name; its path."""
    model = folder / "model"
    if not model.is_dir():
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2}))
        generator = random.Random(0)
        rows = [{"input_ids": [generator.randrange(130) for _ in range(4 + index % 9)]} for index in range(ROWS)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": str(model),
        "model_init": "random",
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"max_steps": steps, "global_batch_size": 4, "learning_rate": 1e-3},
        "strategy": {"tp": 2, "dp_shard": 2},
        "save": {"strategy": "steps", "steps": SAVE_STEPS, "keep": 2, "async": background},
        "restarts": len(kills) + 1,
        "device": "cpu",
        "output_dir": str(folder / name),
    }
    output = lay_out(tree)
    (output / _PLAN).write_text(json.dumps([asdict(kill) for kill in kills]), encoding="utf-8")
    return output


def run_job(output: Path, timeout: float) -> str:
    """Run a prepared job to its end; what it said.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "benchmarks.faults", "--job", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stderr


def judge(output: Path, alone: Path, said: str, steps: int) -> Outcome:
    """What came of a job with kills, against the one without."""
    from shardwise.checkpoint.listing import (
        CHECKPOINTS,
        UNFINISHED,
        complete_checkpoints,
        fault_in,
        read_manifest,
        record_of,
    )

    notes = [json.loads(line) for line in (output / _DONE).read_text(encoding="utf-8").splitlines()]
    counts = dict.fromkeys(POINTS, 0)
    for note in notes:
        counts[note["part"]] += 1
    lost = [max(0, note["made"] - note["saved"]) for note in notes]
    damaged = sum(
        any(record_of(path / name) != record for name, record in read_manifest(path)[1].items())
        for path in complete_checkpoints(output / CHECKPOINTS)
    )
    damaged += sum(bool(fault_in(path)) for path in (output / CHECKPOINTS).glob("step-*"))
    damaged += sum(not line.endswith(UNFINISHED) for line in re.findall(r"passed over step-.*", said))
    back = [float(text) for text in re.findall(r"is made, ([\d.]+) s after the failure", said)]
    exports = [
        {path.name: path.read_bytes() for path in (folder / "export").glob("*.safetensors")}
        for folder in (alone, output)
    ]
    return Outcome(
        kills=counts,
        restarts=len(re.findall(r"; restart \d+ of", said)),
        steps=steps,
        steps_lost=statistics.mean(lost) if lost else 0.0,
        restart_seconds=statistics.median(back) if back else 0.0,
        damaged=damaged,
        equal=bool(exports[0]) and exports[0] == exports[1],
    )


def compare(folder: Path, number: int, steps: int, timeout: float, background: bool) -> Outcome:
    """Both jobs in ``folder``, one after the other."""
    alone = prepare_job(folder, "alone", steps, [], background)
    run_job(alone, timeout)
    killed = prepare_job(folder, "killed", steps, plan_kills(number, steps), background)
    return judge(killed, alone, run_job(killed, timeout), steps)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=0, help="of the run; default: twice the kills, 12 at least")
    parser.add_argument("--async", dest="background", action="store_true", help="save.async")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        from shardwise.launch.agent import launch

        sys.exit(launch(options.job, NUM_RANKS, target="benchmarks.faults:train_and_die"))
    steps = options.steps or max(12, 2 * options.kills)
    with tempfile.TemporaryDirectory(prefix="shardwise-faults-") as folder:
        found = compare(Path(folder), options.kills, steps, 60.0 + 60.0 * options.kills, options.background)
    print("\n".join(found.lines()))
    sys.exit(0 if found.holds(options.kills) else 1)


if __name__ == "__main__":
    main()
