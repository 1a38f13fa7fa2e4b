"""The worker's loop: steps, evaluation, saving, stopping. No branch on any axis of the strategy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwise.checkpoint.adapter import write_adapter
from shardwise.checkpoint.export import export_model, replace_folder, write_into
from shardwise.checkpoint.listing import CHECKPOINTS
from shardwise.checkpoint.shelf import link, supersede
from shardwise.data.batch import Batch
from shardwise.data.loader import Loader
from shardwise.data.rows import name_rows
from shardwise.errors import SaveError
from shardwise.parallel.compiled import CompileClock
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig
from shardwise.train.best import take_best
from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.context import WorkerContext
from shardwise.train.dispatch import Dispatcher
from shardwise.train.identity import RunIdentity
from shardwise.train.keeping import CheckpointKeeper
from shardwise.train.lr import make_schedule
from shardwise.train.memory import MemoryMeter
from shardwise.train.optim import Optimizer
from shardwise.train.progress import ProgressView
from shardwise.train.saving import TrainState
from shardwise.train.setup import LoadedModel, companions
from shardwise.train.step import NonFiniteLossError, NonFinitePolicy, StepResult, evaluate, sum_over_ranks, train_step
from shardwise.train.throughput import Throughput, count_adapter_parameters, device_name


@dataclass(frozen=True)
class TrainerParts:
    """Everything that a run needs, built once."""

    run: RunConfig
    plan: Plan
    context: WorkerContext
    loaded: LoadedModel
    optimizer: Optimizer
    loader: Loader
    eval_loader: Loader | None
    identity: RunIdentity
    meter: MemoryMeter


class Trainer:
    """Runs a job from ``state`` to its end, or to the step at which the user or a callback stops it.

    ``view`` shows messages on rank 0's terminal; it and ``callbacks`` are told of what happens, in their order.
    """

    def __init__(
        self, parts: TrainerParts, state: TrainState, view: ProgressView, callbacks: Sequence[Callback] = ()
    ) -> None:
        self.parts, self.state, self.view = parts, state, view
        self.folder = parts.context.output_dir  # not the run's key: the folder may have been moved
        self.total_steps = count_steps(parts.run, parts.loader, state)
        self._learning_rate = make_schedule(parts.run.train, self.total_steps)
        self.policy = NonFinitePolicy(parts.run.train.on_nan)
        device = parts.loaded.model.mesh.device
        adapters = count_adapter_parameters(parts.loaded.model.shards, device)
        precision = parts.run.train.precision or "fp32"
        self.throughput = Throughput(parts.plan, precision, device_name(device), adapters)
        is_main = parts.context.rank == 0
        self.callbacks = Dispatcher([view, *callbacks], is_main=is_main, device=device, say=view.say)
        self.callbacks.load_state_dict(state.callbacks)
        self.losses: list[float | None] = []  # of the steps made here, the same on every rank
        self._compile_clock = CompileClock() if parts.run.train.compile else None
        self._keeper = CheckpointKeeper(
            parts.run,
            self.folder / CHECKPOINTS,
            parts.context.rank,
            parts.loaded,
            parts.optimizer,
            self._write_adapter,
        )
        self._stopped: str | None = None  # what ended an evaluation
        self._begun = False
        self._exported: TrainState | None = None  # whose weights the model has got at the end, if not the last ones
        self._evaluated: tuple[int, float] | None = None  # the last evaluation's step and loss

    def train(self) -> str | None:
        """Run the steps that are left.

        Returns:
            The name of the signal that stopped the run after saving (rank 0; ``"stop"`` elsewhere), None
            at the regular end.

        Raises:
            CheckpointError: there is too little room for what the run is to write.
        """
        parts = self.parts
        self._keeper.check_room(self.state, self.total_steps)
        try:
            self._begin()
            stopped, reason = self._run()
            self._finish_save()
            if stopped is None and parts.run.save.export:
                if parts.run.save.export == "best":
                    self._exported, note = take_best(self.folder / CHECKPOINTS, parts.loaded.model, self.state)
                    self.view.say(note)
                self.export()
            self.callbacks.call("on_train_end", f"stopped by {stopped}" if stopped else reason)
        except NonFiniteLossError as error:  # on every rank: what was good before stays
            error = self._saved_before(error)
            self.callbacks.failed(error)
            raise error from None
        except BaseException as error:
            self.callbacks.failed(error)
            raise
        finally:
            parts.meter.close()
        return stopped

    def _begin(self) -> None:
        """Tell the callbacks of the run, before its first step or an evaluation that comes before it."""
        if self._begun:
            return
        self._begun = True
        parts = self.parts
        info = RunInfo(
            run=parts.run,
            output_dir=self.folder,
            rank=parts.context.rank,
            world_size=parts.context.world_size,
            first_step=self.state.step,
            total_steps=self.total_steps,
            model=parts.loaded.model,
        )
        self.callbacks.call("on_train_begin", info)

    def _supersede(self, first: int) -> None:
        """With the first step after step ``first``, checkpoints beyond it are of a branch that was left."""
        if self.parts.context.rank == 0 and self.state.step == first + 1:
            for path in supersede(self.folder / CHECKPOINTS, first):
                self.view.say(f"set aside: {path}, a checkpoint beyond step {first}")
            link(self.folder / CHECKPOINTS)

    def _run(self) -> tuple[str | None, str | None]:
        """The loop. Returns the signal that ended it, and the reason of a callback that did."""
        run, first = self.parts.run, self.state.step
        owed = self.state.owed_evaluation
        stopped = self._evaluate(owed) if owed is not None and self.parts.eval_loader else None
        reason = self.callbacks.stop_reason()
        batches: Iterator[Batch] = self.parts.loader.batches(self.state.loader)
        while self.state.step < self.total_steps and not (stopped or reason):
            batch = next(batches)
            stopped = self._step(batch, first)
            epoch_ends = batch.next_state.epoch > batch.epoch
            if self._due(run.eval.strategy, run.eval.steps, epoch_ends):
                self.state = replace(self.state, owed_evaluation=batch.epoch)
                stopped = stopped or self._evaluate(batch.epoch)  # saving comes first, evaluating after the resume
            if epoch_ends:
                self.callbacks.call("on_epoch_end", batch.epoch)
            reason = self.callbacks.stop_reason()
            wanted = stopped or (reason and run.save.strategy != "no")
            if wanted or self._due(run.save.strategy, run.save.steps, epoch_ends):
                self.save()
        return stopped, reason

    def _step(self, batch: Batch, first: int) -> str | None:
        """Make the next step; ``first`` steps were done before this run. Returns the signal that is to end it."""
        parts, number = self.parts, self.state.step + 1
        self.callbacks.call("on_step_begin", number)
        asked = parts.context.stop.requested() if parts.context.rank == 0 else None
        rate = self._learning_rate(self.state.step)
        if self._compile_clock is not None:
            self._compile_clock.take()  # an evaluation since the last step may have compiled
        began = time.perf_counter()
        peaks = [0.0] * parts.context.world_size
        peaks[parts.context.rank] = float(parts.meter.peak_bytes())
        parts.loaded.model.begin_step(self.state.step)
        parts.context.note(f"step {number}")
        result = train_step(
            parts.loaded.model,
            parts.optimizer,
            batch,
            rate,
            parts.run.train.max_grad_norm,
            [float(asked is not None), float(self._keeper.is_writing), float(self._keeper.has_failed), *peaks],
        )
        seconds = time.perf_counter() - began
        # A step without supervised tokens exchanges nothing; the request is heard at the next one.
        stop, writing, failed, *peaks = result.notes or [0.0, 1.0, 0.0, *peaks]
        rows = [parts.loader.rows[index] for index in batch.rows]
        self.policy.check(result, number, name_rows(rows))
        self.state = TrainState(number, self.state.num_updates + (result.loss is not None), batch.next_state)
        self.losses.append(result.loss)
        values = self._values(batch, result, seconds) | {"lr": rate, "peak_memory_bytes": int(max(peaks))}
        if result.skipped is not None:
            values |= {"skipped": f"{result.skipped} in {name_rows(rows)}", "lines": [row.line for row in rows]}
        # Callbacks discard what a start without a step puts back; a restart then takes the newest checkpoint.
        self._supersede(first)
        self.callbacks.call("on_step_end", number, MappingProxyType(values))
        if failed or not writing:
            self._finish_save()
        return (asked or "stop") if stop else None

    def _values(self, batch: Batch, result: StepResult, seconds: float) -> dict[str, Any]:
        """A line of the metrics, but for what only the step knows."""
        lengths = [len(self.parts.loader.rows[index].input_ids) for index in batch.rows if batch.num_tokens]
        compiling = self._compile_clock.take() if self._compile_clock is not None else 0.0
        running = seconds - compiling  # what a step costs leaves it out
        values: dict[str, Any] = {
            "kind": "train",
            "step": self.state.step,
            "epoch": batch.epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "num_tokens": batch.num_tokens,
            "num_input_tokens": batch.num_input_tokens,
            "num_rows": batch.num_rows,
            **({"fill_rate": batch.fill_rate} if self.parts.run.data.packing else {}),
            "step_seconds": seconds,
            "tokens_per_second": batch.num_input_tokens / running if running else 0.0,
            **self.throughput.metrics(lengths, running),
        }
        if compiling:
            values["compile_seconds"] = compiling
        return values | ({} if batch.row_hashes is None else {"row_hashes": list(batch.row_hashes)})

    def _due(self, strategy: str, every: int | None, epoch_ends: bool) -> bool:
        if strategy == "epoch":
            return epoch_ends
        return strategy == "steps" and every is not None and self.state.step % every == 0

    def evaluate(self) -> tuple[float, int] | str:
        """Evaluate outside of :meth:`train`, before or after it; metrics and callbacks learn of it as of the run's own.

        To be called by all ranks.

        Returns:
            The loss over all rows for evaluation and their supervised tokens; or what a stop gives, as :meth:`train`.
        """
        state = self._exported or self.state
        loader, owed = state.loader, state.owed_evaluation
        ended = loader.epoch > 0 and loader.rows_seen == 0  # it stands at the begin of an epoch without a step
        try:
            self._begin()
            found = self._measure()
            if not isinstance(found, str):
                self._tell(found, loader.epoch - ended if owed is None else owed, state.step)
        except BaseException as error:
            self.callbacks.failed(error)
            raise
        return found

    def _measure(self) -> tuple[float, int] | str:
        """The loss over all rows for evaluation and their supervised tokens, or what a stop gives."""
        parts, self._stopped = self.parts, None
        assert parts.eval_loader is not None
        size = parts.run.eval.batch_size or parts.eval_loader.settings.global_batch_size
        found = evaluate(parts.loaded.model, self._until_stopped(parts.eval_loader.eval_batches(size)))
        return self._stopped or found

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Evaluations can outlast the time that a stop leaves for saving, so the ranks agree on it at each batch."""
        stop, device = self.parts.context.stop, self.parts.loaded.model.mesh.device
        for batch in batches:
            asked = stop.requested() if self.parts.context.rank == 0 else None
            (number,) = sum_over_ranks([float(asked is not None)], device)
            if number:
                self._stopped = asked or "stop"
                return
            yield batch

    def _evaluate(self, epoch: int) -> str | None:
        """Evaluate after a step; returns what stopped it."""
        found = self._measure()
        if isinstance(found, str):
            return found
        self._tell(found, epoch, self.state.step)
        return None

    def _tell(self, found: tuple[float, int], epoch: int, step: int) -> None:
        loss, num_tokens = found
        self._evaluated = (step, loss)
        if step == self.state.step:
            self.state = replace(self.state, owed_evaluation=None)
        values = {"kind": "eval", "step": step, "epoch": epoch, "eval_loss": loss, "eval_tokens": num_tokens}
        self.callbacks.call("on_evaluate", MappingProxyType(values))

    def save(self) -> None:
        """Write a checkpoint of the current step, then remove the ones that are too many.

        With ``save.async`` it is written while the next steps are made.

        Raises:
            SaveError: there is no room, or the two copies of a tied weight have drifted apart; nothing is written.
        """
        parts, evaluated = self.parts, self._evaluated
        self._finish_save()
        parts.context.note(f"the save after step {self.state.step}")
        is_new = evaluated is not None and evaluated[0] == self.state.step
        state = {
            "schema": 1,
            "train": replace(self.state, callbacks=self.callbacks.state_dict()).to_json(),
            "identity": asdict(parts.identity),
            "run": parts.run.model_dump(mode="json"),
            "model_folder": str(Path(parts.run.model).absolute()),  # an export may be made from elsewhere
            "best": evaluated[1] if evaluated and is_new and parts.run.save.best != "no" else None,
        }
        self._keeper.begin(self.state.step, state)
        if not parts.run.save.async_:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is on its way, if there is one, and tell of it."""
        path = self._keeper.finish()
        if path is not None:
            self.callbacks.call("on_save", path)

    def _saved_before(self, error: NonFiniteLossError) -> NonFiniteLossError:
        """``error`` when the checkpoint that was on its way is complete; if it cannot be written, both in one."""
        try:
            self._finish_save()
        except SaveError as second:
            return NonFiniteLossError(f"{error}; and of the save under way: {second}")
        return error

    def export(self, folder: Path | None = None) -> None:
        """Write ``export`` or another folder: a Hugging Face folder, or with adapters one in PEFT's format."""
        loaded, target = self.parts.loaded, folder or self.folder / "export"
        if loaded.adapters is not None:
            (replace_folder if folder is None else write_into)(target, self._write_adapter)
            return
        source = companions(self.parts.run)
        export_model(source, target, loaded.naming, loaded.model.shards, replace=folder is None)

    def _write_adapter(self, folder: Path) -> None:
        loaded = self.parts.loaded
        assert loaded.adapters is not None
        write_adapter(companions(self.parts.run), folder, loaded.adapters, loaded.model.shards)


def count_steps(run: RunConfig, loader: Loader, state: TrainState) -> int:
    """Number of the last step of a run that stands at ``state``."""
    left = loader.num_steps(run.train.epochs or 1, state.loader)  # refuses a set without a step
    if run.train.max_steps is not None:
        return run.train.max_steps
    assert run.train.epochs is not None
    return state.step + left
