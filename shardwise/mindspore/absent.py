"""Names of MindSpore that have no counterpart under the same name, and what serves in their place."""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import NoReturn

from shardwise.errors import AbsentError, ConfigError

_MODEL = "models are Hugging Face's; shardwise.AutoModel.from_pretrained(NAME) names one"
_TRAINER = "shardwise.Trainer trains: Trainer(model, args, train_dataset=...).train()"
_SAVING = "the Trainer saves by TrainingArguments(save_strategy=...), and save_model() exports"
_LOADING = "the Trainer resumes by TrainingArguments(resume_from_checkpoint=...)"
_PLANS = "checkpoints load under any plan, nothing has to be transformed"
_PRECISION = "TrainingArguments(bf16=True) chooses the precision"
_PROFILER = "log.profile_steps of run.yaml profiles steps"
_ROWS = "use GeneratorDataset, or give the Trainer a file, a list or a data set of torch or datasets"
_CALLBACK = "derive from shardwise.Callback, whose hooks have other names and arguments"
_STOPPING = "train.early_stopping_patience of run.yaml stops a run"
_GROUPS = "the groups of processes follow from the plan"

ABSENT = {
    "nn": _MODEL,
    "ops": _MODEL,
    "mint": _MODEL,
    "numpy": _MODEL,
    "Tensor": _MODEL,
    "Parameter": _MODEL,
    "jit": _MODEL,
    "lazy_inline": _MODEL,
    "grad": _TRAINER,
    "value_and_grad": _TRAINER,
    "Model": _TRAINER,
    "RunContext": _CALLBACK,
    "Callback": _CALLBACK,
    "LambdaCallback": _CALLBACK,
    "History": "metrics.jsonl has every step",
    "SummaryCollector": "TrainingArguments(report_to=...) names trackers",
    "FlopsUtilizationCollector": "metrics.jsonl has mfu at every step",
    "EarlyStopping": _STOPPING,
    "ReduceLROnPlateau": "TrainingArguments(lr_scheduler_type=...) names the schedules",
    "LearningRateScheduler": "TrainingArguments(lr_scheduler_type=...) names the schedules",
    "OnRequestExit": "a stop signal is always answered by saving",
    "BackupAndRestore": _LOADING,
    "TrainFaultTolerance": "restarts of run.yaml starts a failed job again",
    "FixedLossScaleManager": _PRECISION,
    "DynamicLossScaleManager": _PRECISION,
    "amp": _PRECISION,
    "bfloat16": _PRECISION,
    "float16": _PRECISION,
    "float32": _PRECISION,
    "save_checkpoint": _SAVING,
    "export": _SAVING,
    "load_checkpoint": _LOADING,
    "load_param_into_net": _LOADING,
    "load_distributed_checkpoint": _PLANS,
    "transform_checkpoints": _PLANS,
    "transform_checkpoint_by_rank": _PLANS,
    "merge_pipeline_strategys": _PLANS,
    "unified_safetensors": _PLANS,
    "shard": "how a layer is split is found, and proven; strategy.tp sets the degree",
    "Layout": "how a layer is split is found, and proven; strategy.tp sets the degree",
    "Profiler": _PROFILER,
    "profiler": _PROFILER,
    "set_offload_context": "strategy.recompute saves memory",
    "set_ps_context": "there are no parameter servers",
    "mindrecord": _ROWS,
    "MindDataset": _ROWS,
    "TFRecordDataset": _ROWS,
    "TextFileDataset": _ROWS,
    "CSVDataset": _ROWS,
    "NumpySlicesDataset": _ROWS,
    "create_group": _GROUPS,
    "destroy_group": _GROUPS,
    "get_group_rank_from_world_rank": _GROUPS,
    "get_world_rank_from_group_rank": _GROUPS,
}


def refuse(module: str, name: str) -> NoReturn:
    """Answer the use of a name that ``module`` does not have; to be called by its ``__getattr__``.

    Raises:
        AbsentError: the name is MindSpore's; ``hasattr`` answers False.
        ConfigError: the same in an import, which would replace an AttributeError by a message of its own.
        AttributeError: the name is not MindSpore's.
    """
    if name in ABSENT:
        kind = ConfigError if _imports(sys._getframe(2)) else AbsentError
        raise kind(f"{module}.{name}", f"is not there: {ABSENT[name]}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _imports(frame: FrameType) -> bool:
    """Whether a frame is at ``from MODULE import NAME``: in the import system, which asks packages, or at its end."""
    at = frame.f_code.co_code[frame.f_lasti]
    return frame.f_globals.get("__name__") == "importlib._bootstrap" or dis.opname[at] == "IMPORT_FROM"
