"""``Trainer``: what a script calls. In the first process it starts the job; in a worker it trains its part."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.api.adapters import lora_keys
from shardwise.api.ambient import AMBIENT
from shardwise.api.arguments import TrainingArguments
from shardwise.api.auto import AutoModel, ModelHandle
from shardwise.api.checking import check_before_start
from shardwise.api.contact import contact, devices_said
from shardwise.api.familiar import Familiar, checked
from shardwise.api.messages import unknown
from shardwise.config import apply_overrides
from shardwise.data.memory import EVAL_ROWS, TRAIN_ROWS
from shardwise.errors import ConfigError
from shardwise.front.resolve import prepare
from shardwise.launch.devices import choose_device
from shardwise.launch.place import presets
from shardwise.log import say
from shardwise.spec.aliases import SECTION, put, translate
from shardwise.spec.rules import parse_run
from shardwise.train.callbacks import Callback

if TYPE_CHECKING:
    from shardwise.api.session import Session

# Arguments of Hugging Face's Trainer that are not taken, and why.
_REFUSED = {
    "data_collator": "rows are padded by the engine; give rows with input_ids and labels",
    "compute_loss_func": "the loss is the mean cross entropy over supervised tokens",
    "compute_metrics": "the loss is all that is evaluated",
    "preprocess_logits_for_metrics": "the loss is all that is evaluated",
    "optimizers": "the optimizer is split with the model; use TrainingArguments(optim=...)",
    "optimizer_cls_and_kwargs": "the optimizer is split with the model; use TrainingArguments(optim=...)",
    "model_init": "use AutoModel.from_config(name) for random weights",
}
_TASK = "text_generation"  # MindFormers' name of what is trained here
_TAKEN = (
    "model",
    "args",
    "train_dataset",
    "eval_dataset",
    "tokenizer",
    "processing_class",
    "task",
    "strategy",
    "callbacks",
    "check",
    "peft_config",
)


@dataclass(frozen=True)
class TrainResult:
    """What ``train()`` returns, the same on every rank.

    Attributes:
        global_step: optimizer steps of the run, those before a resume included.
        loss: of the last step that learned something, None if none did.
        training_loss: mean over the steps of this call that learned something.
    """

    global_step: int
    loss: float | None
    training_loss: float | None

    @property
    def metrics(self) -> dict[str, float | None]:
        """The losses under Hugging Face's name."""
        return {"train_loss": self.training_loss}


class Trainer(Familiar):
    """Trains a model on all devices of a job.

    Made in a process that no launcher started, it starts the job on the same script and does not return. In a
    worker, ``train``, ``evaluate`` and ``save_model`` are to be called by every rank.

    Args:
        model: what :class:`AutoModel` returns, or its name.
        args: how to train.
        train_dataset: a file, a list of dictionaries, a data set of torch or of ``datasets``, an iterable, a
            generator function, or a ``GeneratorDataset``. Rank 0 reads it; its rows reach all ranks.
        eval_dataset: the same, for evaluation.
        tokenizer: of text rows, as an object or as a folder; None: that of the model. ``processing_class`` is its
            other name.
        task: None or MindFormers' "text_generation".
        strategy: keys of the section ``strategy``, such as ``{"pp": 2, "tp": 2}``.
        callbacks: told of what happens, in this order; every rank makes the same ones (:class:`Callback`).
        peft_config: a ``peft.LoraConfig``: train adapters.
        check: before the job starts, prove the strategy on a small copy of the model, on a few CPU processes.

    Raises:
        ConfigError, PlanError: what cannot run.
        DifferenceError: the check found a difference.
    """

    def __init__(
        self,
        model: ModelHandle | str | os.PathLike[str],
        args: TrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        strategy: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
        check: bool = False,
        peft_config: Any = None,
        **more: Any,
    ) -> None:
        self.args = _arguments(args)
        self.model = _handle(model, self.args.tree.get("models_dir"))
        self._tokenizer = _tokenizer(more)
        self._datasets = {TRAIN_ROWS: train_dataset, EVAL_ROWS: eval_dataset}
        self._strategy = dict(strategy or {})
        self._lora = None if peft_config is None else lora_keys(peft_config)
        self._callbacks = checked(callbacks)
        self._session: Session | None = None
        self._trained = False
        self._micro_batch_num: int | None = None
        self._checked = check
        tree = self._tree()
        run = parse_run(translate(tree)[0])
        for note in self.args.notes:
            say(f"TrainingArguments: {note}")
        if check:
            check_before_start(tree)
        # Whether the output folder may be used depends on train(), which says whether it resumes.
        contact(lambda: prepare(tree, command="script")[1].devices, run.devices)

    def train(self, resume_from_checkpoint: bool | str | os.PathLike[str] | None = None) -> TrainResult:
        """Train to the end of the run.

        Args:
            resume_from_checkpoint: True for the newest checkpoint of the output folder, or a checkpoint's folder.

        Raises:
            Stopped: (a SystemExit) the user stopped the job; everything is saved.
        """
        if self._trained:
            raise ConfigError("train()", "has been called on this Trainer before", "Make another Trainer")
        if self._datasets[TRAIN_ROWS] is None:
            raise ConfigError("train_dataset", "missing: there is nothing to train on", "Trainer(train_dataset=...)")
        self._trained = True
        session = self._open("train()", resume_from_checkpoint)
        losses = session.train()
        known = [loss for loss in losses if loss is not None]
        mean = sum(known) / len(known) if known else None
        return TrainResult(session.step, known[-1] if known else None, mean)

    def finetune(
        self, finetune_checkpoint: Any = None, resume_training: bool | str | os.PathLike[str] | None = None
    ) -> TrainResult:
        """:meth:`train` under MindFormers' name.

        Raises:
            ConfigError: a ``finetune_checkpoint``: the weights are those of the model.
        """
        if finetune_checkpoint:
            rule = "is not supported: the weights that training begins with are those of the model"
            raise ConfigError(f"finetune_checkpoint = {finetune_checkpoint!r}", rule, "Name its folder as the model")
        return self.train(resume_training)

    def set_parallel_config(self, **config: Any) -> None:
        """MindFormers' section ``parallel_config``, key by key; to be called before the model is used.

        Raises:
            ConfigError: an unknown key or value, one that differs from what was said elsewhere, or the model has been
                loaded, or its split proven, before.
        """
        if self._session is not None:
            rule = "the model has been loaded before"
            raise ConfigError("set_parallel_config()", rule, "Call set_parallel_config() first")
        if self._checked:
            rule = "Trainer(check=True) has proven another split before"
            raise ConfigError("set_parallel_config()", rule, "Give Trainer(strategy=...) what it is to be")
        translated, notes = translate({SECTION: config})
        for note in notes:
            say(note)
        for key, value in translated.get("strategy", {}).items():
            put({"strategy": self._strategy}, f"strategy.{key}", value, "set_parallel_config")
        number = translated.get("train", {}).get("gradient_accumulation_steps")
        if number is not None:
            self._set_micro_batch_num(number)

    def _set_micro_batch_num(self, number: Any) -> None:
        value = f"set_parallel_config(micro_batch_num={number!r})"
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ConfigError(value, "must be a whole number above 0", "Correct it")
        for source, said in (("an earlier call", self._micro_batch_num), ("the context", AMBIENT.micro_batch_num)):
            if said not in (None, number):
                raise ConfigError(value, f"{source} says micro_batch_num = {said!r}", "Give one of them")
        self._micro_batch_num = number

    def evaluate(self) -> dict[str, float]:
        """``eval_loss`` over all rows of ``eval_dataset``, and ``eval_tokens``; the same on every rank."""
        if self._datasets[EVAL_ROWS] is None:
            raise ConfigError("evaluate()", "needs rows to evaluate", "Give Trainer(eval_dataset=...)")
        return self._open("evaluate()").evaluate()

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the model as a Hugging Face folder; None: ``export`` in the output folder. To be called by every
        rank."""
        self._open("save_model()").save_model(None if output_dir is None else Path(output_dir))

    def _open(self, call: str, resume: bool | str | os.PathLike[str] | None = None) -> Session:
        """The model on this rank, loaded at the first use, when all ranks make this call."""
        from shardwise.api.session import Session, meet

        if self._session is None:
            meet(call)
            tree = self._tree()
            if resume:
                tree["resume"] = "auto" if resume is True else os.fspath(resume)
            rows = self.args.per_device_eval_rows
            by_rule = AMBIENT.compile_by_rule and tree.get("train", {}).get("compile") is None
            self._session = Session(tree, self._datasets, self._tokenizer, rows, self._callbacks, by_rule)
        elif resume:
            remedy = "Call train(resume_from_checkpoint=...) first"
            raise ConfigError(f"resume_from_checkpoint = {resume!r}", "the model has been loaded before", remedy)
        else:
            self._session.meet(call)
        return self._session

    def _tree(self) -> dict[str, Any]:
        """Everything that was said, as the keys of one run.yaml; the command line has the last word."""
        train_rows = self._datasets[TRAIN_ROWS]
        batch_size = getattr(train_rows, "batch_size_given", None)
        batch = {"batch_size": batch_size, "micro_batch_num": self._micro_batch_num or AMBIENT.micro_batch_num}
        tree = AMBIENT.add_to(self.args.tree_for(**batch, num_stages=self._num_stages()))
        for key, value in self.model.tree().items():
            put(tree, key, value, "Trainer(model)")
        for key, value in self._strategy.items():
            put(tree, f"strategy.{key}", value, f"strategy[{key!r}]")
        if self._lora is not None:
            put(tree, "lora", self._lora, "Trainer(peft_config)")
        self._put_rows(tree)
        if isinstance(self._tokenizer, str):
            put(tree, "tokenizer", self._tokenizer, "Trainer(tokenizer)")
        for callback in self._callbacks:
            for key, value in getattr(callback, "keys_given", {}).items():
                put(tree, key, value, type(callback).__name__)
        tree["devices"] = devices_said(AMBIENT.device_num, tree.get("devices"))
        tree = apply_overrides(tree, presets(os.environ))
        return to_be_planned(tree, self.args.tree) if AMBIENT.planned else tree

    def _put_rows(self, tree: dict[str, Any]) -> None:
        """The data sets and what they say of themselves, as keys of ``data`` in ``tree``."""
        train_rows = self._datasets[TRAIN_ROWS]
        for key, name in (("train", TRAIN_ROWS), ("eval", EVAL_ROWS)):
            rows = self._datasets[name]
            if rows is not None:
                put(tree, f"data.{key}", os.fspath(rows) if _is_path(rows) else name, name)
        for key, value in getattr(train_rows, "keys_given", {}).items():
            tree.setdefault("data", {}).setdefault(key, value)
        if train_rows is None and "eval" in tree.get("data", {}):  # evaluation alone: the loop needs rows all the same
            tree["data"]["train"] = tree["data"]["eval"]

    def _num_stages(self) -> int:
        """Stages of the pipeline by all that was said, 1 where nothing was; what is no number is refused elsewhere."""
        said: dict[str, Any] = {"strategy": dict(AMBIENT.add_to(self.args.tree).get("strategy", {})) | self._strategy}
        strategy = apply_overrides(said, presets(os.environ))["strategy"]
        stages, pp = strategy.get("stages"), strategy.get("pp")
        if pp is None and isinstance(stages, list | tuple):
            pp = len(stages)
        return pp if isinstance(pp, int) else 1


def to_be_planned(tree: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a run on processes of a CPU with missing degrees to be searched for; another one as it is.

    The batch is what data parallelism on all that the given degrees leave would make it, whatever the plan.

    Args:
        said: what the arguments themselves say of a key.
    """
    device = choose_device(os.environ.get("SHARDWISE_DEVICE") or tree.get("device") or "auto")
    strategy, train, devices = dict(tree.get("strategy", {})), dict(tree.get("train", {})), tree.get("devices")
    if device != "cpu" or not isinstance(devices, int) or devices < 2 or tree.get("nnodes", 1) != 1:
        return tree
    ranks = math.prod(strategy.get(name) or 1 for name in ("pp", "tp"))
    accumulation = train.pop("gradient_accumulation_steps", None)
    if accumulation is not None and "micro_batch_size" not in strategy:
        return tree  # refused where the batch is checked
    if accumulation is not None and devices % ranks == 0:
        train["global_batch_size"] = strategy["micro_batch_size"] * accumulation * (devices // ranks)
        if "micro_batch_size" not in said.get("strategy", {}):
            del strategy["micro_batch_size"]
    elif accumulation is not None:
        return tree  # the product does not fit, and is refused where all of it is known
    return tree | {"strategy": strategy, "train": train, "cluster": tree.get("cluster") or "auto"}


def _is_path(rows: Any) -> bool:
    return isinstance(rows, str | os.PathLike)


def _arguments(args: Any) -> TrainingArguments:
    if args is None or isinstance(args, TrainingArguments):
        return args or TrainingArguments()
    rule = "must be shardwise.TrainingArguments"
    raise ConfigError(f"args of type {type(args).__name__}", rule, "Import it from shardwise")


def _handle(model: Any, models_dir: str | None) -> ModelHandle:
    if isinstance(model, ModelHandle):
        return model
    if _is_path(model):
        return AutoModel.from_pretrained(model, models_dir=models_dir)
    rule = "is not split over devices; a model is given by its name"
    raise ConfigError(f"model of type {type(model).__name__}", rule, "Use shardwise.AutoModel.from_pretrained(NAME)")


def _tokenizer(more: dict[str, Any]) -> Any:
    for name, value in more.items():
        if name in _REFUSED:
            if value is not None:
                raise ConfigError(f"Trainer({name}=...)", f"is not supported: {_REFUSED[name]}", f"Leave {name} out")
        elif name == "task":
            if value not in (None, _TASK):
                raise ConfigError(f"Trainer(task={value!r})", f"must be {_TASK!r}", "Leave task out")
        elif name not in ("tokenizer", "processing_class"):
            raise unknown("Trainer", name, value, [*_TAKEN, *_REFUSED])
    given = [more[name] for name in ("processing_class", "tokenizer") if more.get(name) is not None]
    return os.fspath(given[0]) if given and _is_path(given[0]) else next(iter(given), None)
