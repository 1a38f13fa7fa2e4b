"""What ``import shardwise`` offers to scripts: the names that Hugging Face's users know."""

from __future__ import annotations

from shardwise.api.arguments import TrainingArguments
from shardwise.api.auto import AutoModel, AutoModelForCausalLM, AutoTokenizer
from shardwise.api.messages import show_refusals
from shardwise.api.trainer import Trainer, TrainResult
from shardwise.train.callbacks import Callback

__all__ = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "Callback",
    "TrainResult",
    "Trainer",
    "TrainingArguments",
]

show_refusals()
