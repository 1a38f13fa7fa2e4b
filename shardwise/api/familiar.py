"""What scripts for Hugging Face's Trainer call besides training: done, or refused by name, never ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import AbsentError, ConfigError
from shardwise.files import replace_text
from shardwise.train.callbacks import Callback

_LOOP = "the loop is the engine's, which splits the model"
# Methods that Hugging Face's users override or call, and why there are none.
_ABSENT = {
    "compute_loss": "the loss is the mean cross entropy over supervised tokens",
    "training_step": _LOOP,
    "prediction_step": _LOOP,
    "evaluation_loop": _LOOP,
    "get_train_dataloader": "rows are dealt out by the engine; give train_dataset",
    "get_eval_dataloader": "rows are dealt out by the engine; give eval_dataset",
    "get_test_dataloader": "there is no prediction loop",
    "predict": "there is no prediction loop; load export/ with transformers",
    "create_optimizer": "the optimizer is split with the model; use TrainingArguments(optim=...)",
    "create_scheduler": "use TrainingArguments(lr_scheduler_type=..., lr_scheduler_kwargs=...)",
    "create_optimizer_and_scheduler": "use TrainingArguments(optim=..., lr_scheduler_type=...)",
    "optimizer": "the optimizer is split with the model",
    "lr_scheduler": "the rate of a step is in metrics.jsonl",
    "state": "metrics.jsonl has every step and every evaluation",
    "control": "a callback ends a run with self.stop(reason)",
    "accelerator": _LOOP,
    "model_wrapped": _LOOP,
    "log": "a callback's on_step_end sees every line of metrics.jsonl",
    "hyperparameter_search": "start a run for each setting",
    "push_to_hub": "nothing is pushed; upload export/",
    "create_model_card": "nothing is pushed; upload export/",
    "remove_callback": "give Trainer the callbacks that you want",
    "pop_callback": "give Trainer the callbacks that you want",
}


class Familiar:
    """Members of Hugging Face's Trainer beside ``train``, ``evaluate`` and ``save_model``."""

    _callbacks: list[Callback]
    _session: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a subclass whose methods would never be called.

        Raises:
            AbsentError: it overrides a step of Hugging Face's loop.
        """
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if name in _ABSENT and callable(value):
                raise _absent(f"{cls.__name__}.{name}", name, "would never be called: ")

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise _absent(f"Trainer.{name}", name, "is not supported: ")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_callback(self, callback: Callback | type[Callback]) -> None:
        """One more callback, behind the others; before the run begins, and on every rank."""
        if self._session is not None:
            raise ConfigError("add_callback()", "the run has begun", "Call it before train() and evaluate()")
        self._callbacks += checked([callback])

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print ``metrics`` on rank 0, a line each."""
        if self.is_world_process_zero():
            width = max(map(len, metrics), default=0)
            for name, value in metrics.items():
                print(f"{split}  {name:<{width}} = {value}", flush=True)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write ``metrics`` to ``SPLIT_results.json`` in the output folder; ``combined``: into all_results.json, too.

        Raises:
            ConfigError: the run has not begun, so the folder is not yet its own.
        """
        if self._session is None:
            raise ConfigError("save_metrics()", "the run has not begun", "Call it behind train() or evaluate()")
        if not self.is_world_process_zero():
            return
        folder, values = Path(self._session.run.output_dir), dict(metrics)
        _write(folder / f"{split}_results.json", values)
        if combined:
            path = folder / "all_results.json"
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write(path, before | values)

    def save_state(self) -> None:
        """Nothing is left to be saved: ``metrics.jsonl`` and ``status.json`` are written as a run goes on."""

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return int(os.environ.get("RANK", "0")) == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return int(os.environ.get("LOCAL_RANK", "0")) == 0


def checked(callbacks: Any) -> list[Callback]:
    """Callbacks as a list; a class stands for an object of it.

    Raises:
        ConfigError: one is not derived from :class:`Callback`.
    """
    made = [given() if isinstance(given, type) and issubclass(given, Callback) else given for given in callbacks or ()]
    for callback in made:
        if not isinstance(callback, Callback):
            rule = "is no object of a class derived from shardwise.Callback"
            raise ConfigError(f"callbacks: {callback!r}", rule, "Derive it: class Mine(shardwise.Callback)")
    return made


def _absent(value: str, name: str, rule: str) -> AbsentError:
    return AbsentError(value, rule + _ABSENT[name], "Leave it out")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(values, indent=4, sort_keys=True) + "\n")
