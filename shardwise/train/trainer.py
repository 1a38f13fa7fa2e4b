"""The worker's loop: steps, evaluation, saving, stopping. No branch on any axis of the strategy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.adapter import ADAPTER_FOLDER, write_adapter
from shardwise.checkpoint.export import export_model, write_whole
from shardwise.checkpoint.store import rotate, save_checkpoint
from shardwise.data.batch import Batch
from shardwise.data.loader import Loader
from shardwise.errors import CheckpointError
from shardwise.spec.run import RunConfig
from shardwise.train.context import WorkerContext
from shardwise.train.lr import learning_rate
from shardwise.train.memory import MemoryMeter
from shardwise.train.metrics import MetricsFile
from shardwise.train.optim import Optimizer
from shardwise.train.progress import ProgressView
from shardwise.train.saving import CHECKPOINTS, RunIdentity, TrainState, all_tensors
from shardwise.train.setup import LoadedModel
from shardwise.train.status import update_status
from shardwise.train.step import StepResult, evaluate, sum_over_ranks, train_step


@dataclass(frozen=True)
class TrainerParts:
    """Everything that a run needs, built once."""

    run: RunConfig
    context: WorkerContext
    loaded: LoadedModel
    optimizer: Optimizer
    loader: Loader
    eval_loader: Loader | None
    identity: RunIdentity
    meter: MemoryMeter


class Trainer:
    """Runs a job from ``state`` to its end, or to the step at which the user stops it."""

    def __init__(self, parts: TrainerParts, state: TrainState) -> None:
        self.parts, self.state = parts, state
        run = parts.run
        self.is_main = parts.context.rank == 0
        self.folder = Path(run.output_dir)
        left = parts.loader.num_steps(run.train.epochs, state.loader) if run.train.epochs else 0
        self.total_steps = run.train.max_steps or state.step + left
        self.metrics = MetricsFile(self.folder, state.step) if self.is_main else None
        self.view = ProgressView(parts.context.terminal, self.total_steps, run.log.steps, state.step)
        self._began, self._first_step = time.monotonic(), state.step

    def train(self) -> str | None:
        """Run the steps that are left.

        Returns:
            The name of the signal that stopped the run after saving (rank 0; ``"stop"`` elsewhere), None
            at the regular end.
        """
        run = self.parts.run
        stopped = None
        batches: Iterator[Batch] = self.parts.loader.batches(self.state.loader)
        try:
            while self.state.step < self.total_steps and stopped is None:
                batch = next(batches)
                stopped = self._step(batch)
                epoch_ends = batch.next_state.epoch > batch.epoch
                if self._due(run.eval.strategy, run.eval.steps, epoch_ends):
                    self._evaluate(batch.epoch)
                if stopped is not None or self._due(run.save.strategy, run.save.steps, epoch_ends):
                    self.save()
            if stopped is None and run.save.export:
                self.export()
        finally:
            self.view.close()
            self.parts.meter.close()
        return stopped

    def _step(self, batch: Batch) -> str | None:
        parts = self.parts
        asked = parts.context.stop.requested() if self.is_main else None
        rate = learning_rate(parts.run.train, self.state.step, self.total_steps)
        began = time.perf_counter()
        peaks = [0.0] * parts.context.world_size
        peaks[parts.context.rank] = float(parts.meter.peak_bytes())
        parts.loaded.model.begin_step(self.state.step)
        result = train_step(
            parts.loaded.model,
            parts.optimizer,
            batch,
            rate,
            parts.run.train.max_grad_norm,
            [float(asked is not None), *peaks],
        )
        seconds = time.perf_counter() - began
        updated = result.loss is not None
        self.state = TrainState(self.state.step + 1, self.state.num_updates + updated, batch.next_state)
        # A step without supervised tokens exchanges nothing; the request is heard at the next one.
        stop, *peaks = result.notes or [0.0, *peaks]
        self._report(batch, result, rate, seconds, int(max(peaks)))
        return (asked or "stop") if stop else None

    def _report(self, batch: Batch, result: StepResult, rate: float, seconds: float, peak_bytes: int) -> None:
        if self.metrics is None:
            return
        values: dict[str, Any] = {
            "kind": "train",
            "step": self.state.step,
            "epoch": batch.epoch,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "num_tokens": batch.num_tokens,
            "num_input_tokens": batch.num_input_tokens,
            "num_rows": batch.num_rows,
            "step_seconds": seconds,
            "tokens_per_second": batch.num_input_tokens / seconds if seconds else 0.0,
            "mfu": None,
            "peak_memory_bytes": peak_bytes,
        }
        if result.loss is None:
            lines = [self.parts.loader.rows[index].line for index in batch.rows]
            values["skipped"] = f"no supervised token in rows of lines {lines}"
            self.view.say(f"warning: step {self.state.step} {values['skipped']}; the weights stay as they are")
        if batch.row_hashes is not None:
            values["row_hashes"] = list(batch.row_hashes)
        self.metrics.write(values)
        update_status(self.folder, step=self.state.step)
        done = self.state.step - self._first_step
        eta = (time.monotonic() - self._began) / done * (self.total_steps - self.state.step)
        self.view.step(values, eta)

    def _due(self, strategy: str, every: int | None, epoch_ends: bool) -> bool:
        if strategy == "epoch":
            return epoch_ends
        return strategy == "steps" and every is not None and self.state.step % every == 0

    def _evaluate(self, epoch: int) -> None:
        parts = self.parts
        assert parts.eval_loader is not None
        size = parts.run.eval.batch_size or parts.eval_loader.settings.global_batch_size
        loss, num_tokens = evaluate(parts.loaded.model, parts.eval_loader.eval_batches(size))
        if self.metrics is not None:
            values = {"kind": "eval", "step": self.state.step, "epoch": epoch, "eval_loss": loss}
            self.metrics.write(values | {"eval_tokens": num_tokens})
            self.view.say(f"evaluation after step {self.state.step}: loss {loss:.4f} over {num_tokens} tokens")

    def save(self) -> None:
        """Write a checkpoint of the current step, then remove the ones that are too many.

        Raises:
            CheckpointError: the two copies of a tied weight have drifted apart; nothing is written.
        """
        parts = self.parts
        (drifted,) = sum_over_ranks([float(not parts.loaded.model.tied_copies_agree())], parts.loaded.model.mesh.device)
        if drifted:
            raise CheckpointError(
                f"step {self.state.step}", "the copies of the tied embedding differ", "Please report this"
            )
        state = {
            "schema": 1,
            "train": self.state.to_json(),
            "identity": asdict(parts.identity),
            "run": parts.run.model_dump(mode="json"),
        }
        folder = self.folder / CHECKPOINTS
        path = save_checkpoint(
            folder,
            self.state.step,
            all_tensors(parts.loaded.model, parts.optimizer),
            state,
            Path(parts.run.model),
            (lambda draft: self._write_adapter(draft / ADAPTER_FOLDER)) if parts.loaded.adapters else None,
        )
        if self.is_main:
            rotate(folder, parts.run.save.keep)
            update_status(self.folder, checkpoint=str(path.relative_to(self.folder)))
            self.view.say(f"saved {path}")

    def export(self) -> None:
        """Write ``export``: a Hugging Face folder, or with adapters one in PEFT's format."""
        loaded = self.parts.loaded
        if loaded.adapters is not None:
            write_whole(self.folder / "export", self._write_adapter)
            return
        export_model(
            Path(self.parts.run.model),
            self.folder / "export",
            loaded.shapes,
            loaded.model.shards,
            loaded.export_dtype,
            loaded.naming,
        )

    def _write_adapter(self, folder: Path) -> None:
        loaded = self.parts.loaded
        assert loaded.adapters is not None
        write_adapter(Path(self.parts.run.model), folder, loaded.adapters, loaded.model.shards)
