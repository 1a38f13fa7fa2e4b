"""``run.yaml`` as frozen data: every key of the contract, with its default.

The classes hold what the user said; :func:`shardwise.spec.rules.parse_run` builds them from a tree
and holds the rules between keys, :mod:`shardwise.spec.strategy` the split that follows from them.
Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    ValidationInfo,
    field_validator,
)

from shardwise.config import dump_yaml

# A count beyond these is a slip of the pen, and would be met as a full memory or a wait without end.
MAX_COUNT, MAX_SEED = 2**40, 2**63 - 1
PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


Precision = Literal["fp32", "bf16"]  # in which training computes
# What the rows of a data file look like; auto: found by looking at them.
DataFormat = Literal[
    "auto", "tokens", "messages", "sharegpt", "segments", "alpaca", "prompt_completion", "pairs", "text"
]


# Names of columns that formats know, which data.columns may give to those of a file.
COLUMNS = (
    *("messages", "conversations", "tools", "system", "history", "prompt", "query", "response", "completion"),
    *("instruction", "input", "output", "question", "answer", "context", "text", "segments"),
    *("user", "assistant"),
    *("input_ids", "labels", "position_ids", "completion_mask", "assistant_masks", "loss_mask"),
    *("functions", "chat_template_kwargs"),
)
Columns = dict[str, str] | None


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """``tp: true`` would pass as 1; a reader of YAML 1.1 makes ``save.strategy: no`` false."""
        field = cls.model_fields[str(info.field_name)]
        if not isinstance(value, bool) or field.annotation is bool or bool in get_args(field.annotation):
            return value
        if value is False and field.default == "no":
            return "no"
        raise ValueError("must not be true or false")


class SourceConfig(_Section):
    """One of several sources of rows; ``weight`` is its share of an epoch, ``format`` and ``columns`` its own."""

    path: str
    weight: float | None = Field(default=None, gt=0.0)
    format: DataFormat | None = None
    columns: Columns = None


Sources = str | tuple[SourceConfig, ...] | None


class DataConfig(_Section):
    """Where the rows come from, and in which order they are used."""

    train: Sources = None
    eval: Sources = None
    val_size: float | None = Field(default=None, ge=0.0)  # below 1 a share of the rows, else their number
    max_samples: PositiveInt | None = None
    format: DataFormat = "auto"
    columns: Columns = None
    chat_template_kwargs: dict[str, JsonValue] | None = None  # a row's own come first
    max_length: PositiveInt | None = None
    on_long: Literal["refuse", "truncate", "drop", "split"] = "refuse"
    loss: Literal["assistant", "last_turn", "all_turns", "text"] = "assistant"
    packing: bool = False
    group_by_length: bool = False
    shuffle: bool = True
    seed: Seed | None = None  # None: train.seed
    drop_last: bool = False
    on_bad_rows: Literal["refuse", "skip"] = "refuse"

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _names_are_sources(cls, value: Any) -> Any:
        """``[a.jsonl, b.jsonl]`` is a list of sources without weights, and a source alone a list of one."""
        if isinstance(value, dict):
            return [value]
        if not isinstance(value, list | tuple):
            return value
        return [{"path": item} if isinstance(item, str) else item for item in value]


def data_sources(given: Sources) -> tuple[SourceConfig, ...]:
    """The sources of ``data.train`` or ``data.eval``, in their order."""
    return (SourceConfig(path=given),) if isinstance(given, str) else given or ()


LrScheduler = Literal[
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
_Shape = Literal["linear", "cosine", "1-sqrt"]


class LrSchedulerConfig(_Section):
    """Settings of single schedules of the learning rate, by the names of transformers; None: its default there."""

    num_cycles: float | None = Field(default=None, gt=0.0)
    power: float | None = Field(default=None, gt=0.0)
    lr_end: NonNegativeFloat | None = None
    timescale: PositiveInt | None = None
    min_lr: NonNegativeFloat | None = None
    min_lr_rate: float | None = Field(default=None, ge=0.0, le=1.0)
    warmup_lr_rate: float | None = Field(default=None, ge=0.0, le=1.0)
    num_decay_steps: PositiveInt | None = None
    num_stable_steps: NonNegativeInt | None = None
    min_lr_ratio: float | None = Field(default=None, ge=0.0, le=1.0)
    warmup_type: _Shape | None = None
    decay_type: _Shape | None = None


class TrainConfig(_Section):
    """The mathematics of the run: batch, optimizer, schedule of the learning rate, seed."""

    global_batch_size: PositiveInt | None = None  # None: 8, or what gradient_accumulation_steps gives
    gradient_accumulation_steps: PositiveInt | None = None
    epochs: PositiveInt | None = None  # None: 3, unless max_steps is given
    max_steps: PositiveInt | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: NonNegativeFloat = 5e-5
    lr_scheduler: LrScheduler = "linear"
    lr_scheduler_kwargs: LrSchedulerConfig | None = None
    warmup_steps: NonNegativeInt = 0
    warmup_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    adam_eps: float = Field(default=1e-8, gt=0.0)
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    max_grad_norm: NonNegativeFloat | None = 1.0  # None or 0: no clipping
    precision: Precision | None = None
    compile: bool = False
    seed: Seed = 42
    on_nan: Literal["stop", "skip"] = "stop"
    early_stopping_patience: PositiveInt | None = None


class StrategyConfig(_Section):
    """The split as given; a missing degree is filled by :func:`shardwise.spec.strategy.resolve`."""

    pp: PositiveInt | None = None
    tp: PositiveInt | None = None
    dp: PositiveInt | None = None
    dp_replicate: PositiveInt | None = None
    dp_shard: PositiveInt | None = None
    reshard: bool | None = None
    cp: PositiveInt | None = None
    ep: PositiveInt | None = None
    sequence_parallel: bool = False
    tp_whole: float | None = Field(default=None, ge=0.0, le=1.0)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    virtual_stages: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    gradient_aggregation_group: PositiveInt | None = None
    recompute: Literal["none", "selective", "full"] | NonNegativeInt = "none"
    stages: tuple[PositiveInt, ...] | None = None
    plan: str | None = None


class LoraConfig(_Section):
    """Low-rank adapters: their sizes, where they go, and what is trained whole beside them.

    ``target_modules``: names (or ends of names) of linear layers, a text that is a regular expression for
    whole names, ``all-linear``; None means that too: all linear layers but the head.
    """

    r: PositiveInt = 8
    alpha: float = 16.0
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: str | tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()


class SaveConfig(_Section):
    """When checkpoints are written, and how many stay."""

    model_config = ConfigDict(populate_by_name=True)

    strategy: Literal["no", "steps", "epoch"] = "no"
    steps: PositiveInt | None = None
    keep: PositiveInt = 3
    best: str = "no"
    async_: bool = Field(default=False, alias="async")
    export: bool | Literal["best"] = True  # best: not the last step's model, but that of the best checkpoint
    grace_seconds: NonNegativeFloat = 600.0


class EvalConfig(_Section):
    """When the evaluation rows are run, and how many at once over all data ranks."""

    strategy: Literal["no", "steps", "epoch"] = "no"
    steps: PositiveInt | None = None
    batch_size: PositiveInt | None = None  # None: the training batch


class LogConfig(_Section):
    """What is written to the terminal and to ``metrics.jsonl``."""

    steps: PositiveInt = 1
    rows: bool = False
    report_to: str | tuple[str, ...] | None = None
    profile_steps: str | int | None = None  # 3, 3,7 or 3-5,9: shardwise.spec.ranges


class RunConfig(_Section):
    """A whole ``run.yaml``."""

    model: str
    tokenizer: str | None = None
    model_init: Literal["pretrained", "random"] = "pretrained"
    attn_implementation: Literal["sdpa", "eager"] | None = None  # sdpa where the model has it
    chat_template: str | None = None
    trust_remote_code: bool = False
    models_dir: str | None = None
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    strategy: StrategyConfig = StrategyConfig()
    lora: LoraConfig | None = None
    use_lora: bool = False
    save: SaveConfig = SaveConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    resume: str = "no"
    overwrite: bool = False
    restarts: NonNegativeInt = 0
    output_dir: str = "output"
    devices: PositiveInt | None = None
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    nnodes: PositiveInt = 1
    node_rank: NonNegativeInt = 0
    rdzv_endpoint: str | None = None
    cluster: str | None = None
    filled: tuple[str, ...] = ()  # of a resolved run: shardwise.spec.filled


TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")


def tracker_names(run: RunConfig) -> tuple[str, ...]:
    """The trackers of ``log.report_to``, each once; none for ``none``."""
    given = run.log.report_to or ()
    names = (given,) if isinstance(given, str) else given
    return tuple(dict.fromkeys(name for name in names if name != "none"))


def dump_run(run: RunConfig) -> str:
    """The text of a ``run.yaml`` that reads back equal; keys are spelt as the contract spells them."""
    return dump_yaml(run.model_dump(mode="json", by_alias=True))


def data_paths(run: RunConfig) -> list[tuple[str, str]]:
    """``(key, path)`` of every source of rows."""
    given = {"data.train": run.data.train, "data.eval": run.data.eval}
    return [(key, source.path) for key, sources in given.items() for source in data_sources(sources)]
