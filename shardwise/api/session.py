"""A Trainer at work in one worker: the plan that rank 0 made, the model on this rank, the engine's trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.data.memory import MemoryData
from shardwise.errors import LaunchError, PlanError, ShardwiseError
from shardwise.front.compiler import missing_for_compiling
from shardwise.front.resolve import prepare
from shardwise.launch.culprit import WorkerError
from shardwise.launch.output import write_run
from shardwise.launch.script_worker import ScriptWorker, Stopped, script_worker
from shardwise.launch.worker import tell_failure, worker_error
from shardwise.log import say
from shardwise.report.console import show_line, show_plan
from shardwise.report.results import unbroken
from shardwise.spec.aliases import translate
from shardwise.spec.paths import local_path
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig
from shardwise.spec.strategy import AXES
from shardwise.train.callbacks import Callback
from shardwise.train.context import WorkerContext
from shardwise.train.ended import EndsAgain, end_of
from shardwise.train.identity import begun_again
from shardwise.train.previous import is_set_aside
from shardwise.train.status import Status, finish_status, write_status
from shardwise.train.worker import make_trainer


class Session:
    """One rank of a run. Every method is to be called by all ranks.

    Args:
        tree: the keys of the run.
        datasets: rows by the name that stands for them.
        tokenizer: of text rows; None or a name: the run's own.
        per_device_eval_rows: rows of an evaluation step on each data rank.
        callbacks: called after those of the run itself.
        compile_by_rule: let the rule decide whether blocks are compiled.

    Raises:
        ShardwiseError: what cannot run, on every rank.
    """

    def __init__(
        self,
        tree: dict[str, Any],
        datasets: Mapping[str, Any],
        tokenizer: Any = None,
        per_device_eval_rows: int | None = None,
        callbacks: Sequence[Callback] = (),
        compile_by_rule: bool = False,
    ) -> None:
        worker = script_worker()
        assert worker is not None, "a Trainer starts its job before it works"
        self._worker = worker
        held = {name: rows for name, rows in datasets.items() if name in _names(tree)}
        self.run, self.plan, again, ended = _agree(worker, tree, list(held), per_device_eval_rows)
        device = self.plan.device_type
        compiler = worker.store.agree(lambda: not missing_for_compiling(device)) if compile_by_rule else None
        self.context = worker.settle(Path(self.run.output_dir), again)
        self._tokenizer = None if isinstance(tokenizer, str) else tokenizer
        with _Telling(worker, self.context):
            self._show(tree.get("strategy") or {})
            worker.open_group(device, self.plan.strategy.dp_shard > 1)
            memory = MemoryData(held, self._tokenizer)
            callbacks = callbacks if ended is None else [*callbacks, EndsAgain(*ended)]
            self._trainer = make_trainer(self.run, self.plan, self.context, memory, callbacks, compiler)
            self.run = self._trainer.parts.run

    @property
    def step(self) -> int:
        """Optimizer steps of the run so far."""
        return self._trainer.state.step

    def meet(self, call: str) -> None:
        """:func:`meet`, with word of a failure where the run's results lie."""
        with _Telling(self._worker, self.context):
            meet(call)

    def train(self) -> list[float | None]:
        """The loss of each step that was made; a step without supervised tokens has none.

        Raises:
            Stopped: the user has stopped the job, and everything is saved.
        """
        with _Telling(self._worker, self.context):
            stopped = self._trainer.train()
            if stopped:
                raise Stopped(stopped)
            if self.run.save.export:
                export = self.context.output_dir / "export"
                self._save_tokenizer(export)
                self._say(f"exported {'adapter' if self.run.lora else 'model'}: {export}")
        if self.context.rank == 0:
            finish_status(self.context.output_dir, state="done", exit_code=0)
        return list(self._trainer.losses)

    def evaluate(self) -> dict[str, float]:
        """The loss over the evaluation rows, and their supervised tokens.

        Raises:
            Stopped: the user has stopped the job.
        """
        with _Telling(self._worker, self.context):
            found = self._trainer.evaluate()
            if isinstance(found, str):
                raise Stopped(found)
        self._finish()
        loss, num_tokens = found
        return {"eval_loss": loss, "eval_tokens": num_tokens}

    def save_model(self, folder: Path | None) -> None:
        """Write the Hugging Face folder."""
        with _Telling(self._worker, self.context):
            self._trainer.export(folder)
            self._save_tokenizer(folder or self.context.output_dir / "export")
        self._finish()

    def _finish(self) -> None:
        """Under a foreign launcher nobody else writes how the job ended: so far, well."""
        if self.context.rank == 0 and not self._worker.place.ours:
            finish_status(self.context.output_dir, state="done", exit_code=0)

    def _save_tokenizer(self, folder: Path) -> None:
        """A tokenizer that the script has brought (and perhaps changed) belongs to the model."""
        if self.context.rank == 0 and self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)

    def _say(self, text: str) -> None:
        if self.context.terminal is not None:
            print(text, file=self.context.terminal, flush=True)

    def _show(self, given: Mapping[str, Any]) -> None:
        if self.context.terminal is None:
            return
        console = unbroken(Console(file=self.context.terminal))
        show_plan(self.run, self.plan, console)
        known = {name for name, value in given.items() if value is not None}
        known |= {"pp"} if "stages" in known else set()
        known |= {"dp_replicate", "dp_shard"} if "dp" in known else set()
        filled = [f"{axis} {getattr(self.plan.strategy, axis)}" for axis in AXES if axis not in known]
        if filled:
            rule = f"not given: what the other degrees leave of {self.plan.devices} devices is data parallel"
            rule = "not given: the fastest plan that fits" if self.plan.predicted else rule
            show_line(console, "filled", f"{', '.join(filled)} ({rule})")


def meet(call: str) -> None:
    """Wait until every rank makes this call of a Trainer, see :meth:`shardwise.launch.join.JobStore.meet`."""
    worker = script_worker()
    assert worker is not None, "a Trainer starts its job before it works"
    worker.store.meet(call)


def _names(tree: dict[str, Any]) -> set[str]:
    data = tree.get("data", {})
    return {name for name in (data.get("train"), data.get("eval")) if isinstance(name, str)}


def _agree(
    worker: ScriptWorker, tree: dict[str, Any], in_memory: list[str], eval_rows: int | None
) -> tuple[RunConfig, Plan, bool, tuple[int, str] | None]:
    """The run and its plan, made by rank 0 before there is a process group. It also makes the output folder.

    Also whether an attempt of this job before has worked in that folder, and failed: the run goes on there; and where
    a callback had ended it by then, after which step and why.
    """

    def make() -> dict[str, Any]:
        given = tree
        said = parse_run(translate(tree)[0])
        output = local_path(said.output_dir)
        again = worker.has_worked_in(output)
        goes_on = again and not is_set_aside(output)
        ended = end_of(output) if goes_on else None
        if goes_on:  # before it is looked at: what the script says to resume may have been removed by its own run
            given = translate(tree)[0] | {"resume": begun_again(said, output).resume, "overwrite": False}
        run, plan = prepare(given | {"devices": worker.place.world_size}, in_memory=in_memory, own_output=again)
        if plan.devices != worker.place.world_size:  # planned, by cluster
            rule = f"the fastest plan is for {plan.devices} devices"
            raise PlanError(f"{worker.place.world_size} processes", rule, f"Start {plan.devices}, or leave cluster out")
        if eval_rows is not None:
            rows = eval_rows * plan.strategy.dp
            run = run.model_copy(update={"eval": run.eval.model_copy(update={"batch_size": rows})})
        run = run.model_copy(update={"output_dir": os.path.abspath(run.output_dir)})
        if worker.has_left(output):
            say(f"{output} is a new folder, so this attempt begins anew; with the same output_dir it would go on")
        folder = write_run(run, plan, goes_on=goes_on, begin=lambda: worker.begin(output))
        at, reason = ended or (None, None)
        write_status(folder, Status(state="running", ended_at=at, reason=reason))  # it may fail before it is there
        values = {"run": run.model_dump(mode="json", by_alias=True), "plan": plan.to_json()}
        return values | {"again": again, "ended": ended}

    agreed = worker.store.agree(make)
    ended = None if agreed["ended"] is None else (int(agreed["ended"][0]), str(agreed["ended"][1]))
    return parse_run(agreed["run"]), Plan.from_json(agreed["plan"]), agreed["again"], ended


class _Telling:
    """Tells of an error in ``status.json`` where no launcher of ours does; the error goes on."""

    def __init__(self, worker: ScriptWorker, context: WorkerContext) -> None:
        self._worker, self._context = worker, context

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or self._worker.place.ours or isinstance(error, SystemExit):
            return
        code = error.exit_code if isinstance(error, ShardwiseError) else LaunchError.exit_code
        written: WorkerError = worker_error(self._context.rank, error, code)
        tell_failure(self._context.output_dir, written)
