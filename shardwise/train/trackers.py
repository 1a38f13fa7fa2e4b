"""``log.report_to``: every number of ``metrics.jsonl``, and the configuration, for the services that show curves.

Each adapter translates to one service's own package and does no more. Nothing leaves the machine unless the
user says so by the service's own variable: WANDB_MODE, SWANLAB_MODE, MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from shardwise.config import dump_yaml, flatten
from shardwise.log import say
from shardwise.spec.run import RunConfig
from shardwise.train.callbacks import Callback, RunInfo

PROJECT = "shardwise"


class Tracker(Callback):
    """What the adapters have in common. A failure is reported once and costs the run nothing but the curves.

    The run in the service ends with the training. An evaluation that a script makes after it is in metrics.jsonl alone.
    """

    main_only = True
    optional = True
    may_stop = False
    _is_open = False

    def on_train_begin(self, info: RunInfo) -> None:
        with redirect_stdout(sys.stderr):  # some greet on stdout, which is kept for results
            self.open(info, info.output_dir.resolve())
        self._is_open = True

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.log(numbers(metrics), step)

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        if self._is_open:
            self.log(numbers(metrics), metrics["step"])
        else:
            say(f"{self.name}: its run ended with the training; this evaluation is in metrics.jsonl alone")

    def on_train_end(self, reason: str | None) -> None:
        self._close(failed=None)

    def on_exception(self, error: BaseException) -> None:
        self._close(failed=f"{type(error).__name__}: {error}")

    def _close(self, failed: str | None) -> None:
        if self._is_open:
            self._is_open = False
            with redirect_stdout(sys.stderr):
                self.close(failed)

    def open(self, info: RunInfo, folder: Path) -> None:
        """Begin a run in the service; ``folder`` is the output folder, whole."""
        raise NotImplementedError

    def log(self, values: dict[str, float], step: int) -> None:
        """Add numbers of one step."""
        raise NotImplementedError

    def close(self, failed: str | None) -> None:
        """End the run; ``failed`` is the error that it ended by."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in ``tensorboard/``; a resumed run goes on in the same curves."""

    def open(self, info: RunInfo, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What another start wrote behind the checkpoint is hidden.
        purge = info.first_step + 1 if info.first_step else None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        text = dump_yaml(configuration(info.run))
        self._writer.add_text("run.yaml", "".join(f"    {line}\n" for line in text.splitlines()), info.first_step)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: str | None) -> None:
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases; ``mode`` is its own: offline (in ``wandb/``, to be sent by ``wandb sync``) or online."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def open(self, info: RunInfo, folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT, name=folder.name, dir=str(folder), config=configuration(info.run), mode=self._mode
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self, failed: str | None) -> None:
        self._run.finish(exit_code=1 if failed else 0)


class SwanLab(Tracker):
    """SwanLab; ``mode`` is its own: offline (in ``swanlab/``, to be sent by ``swanlab sync``), local or online."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def open(self, info: RunInfo, folder: Path) -> None:
        self._swanlab = importlib.import_module("swanlab")
        self._swanlab.init(
            project=PROJECT,
            name=folder.name,
            log_dir=str(folder / "swanlab"),
            config=configuration(info.run),
            mode=self._mode,
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._swanlab.log(values, step=step)

    def close(self, failed: str | None) -> None:
        if failed:
            self._swanlab.finish(state="crashed", error=failed)
        else:
            self._swanlab.finish()


class MLflow(Tracker):
    """MLflow; into the server that its own variable names, else into ``mlflow.db`` of the output folder."""

    def open(self, info: RunInfo, folder: Path) -> None:
        self._mlflow = importlib.import_module("mlflow")
        if not self._mlflow.is_tracking_uri_set():
            self._mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(flatten(configuration(info.run)))

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self, failed: str | None) -> None:
        self._mlflow.end_run(status="FAILED" if failed else "FINISHED")


def make_trackers(names: tuple[str, ...], environ: Mapping[str, str]) -> list[Tracker]:
    """The adapters of ``log.report_to``; where a service would want an account, it stays offline by default."""
    makers = {
        "tensorboard": TensorBoard,
        "wandb": lambda: WandB(environ.get("WANDB_MODE", "offline")),
        "swanlab": lambda: SwanLab(environ.get("SWANLAB_MODE", "offline")),
        "mlflow": MLflow,
    }
    return [makers[name]() for name in names]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What of a line of metrics can be drawn: ``train/loss`` and so on, without the step itself."""
    return {
        f"{metrics['kind']}/{name}": float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


def configuration(run: RunConfig) -> dict[str, Any]:
    """The resolved run as nested plain values."""
    return run.model_dump(mode="json", by_alias=True)
