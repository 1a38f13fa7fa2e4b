"""Shardwise: automatic model-parallel training of Hugging Face language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoTokenizer",
    "Callback",
    "Trainer",
    "TrainingArguments",
    "__version__",
]

if TYPE_CHECKING:
    from shardwise.api import AutoModel, AutoModelForCausalLM, AutoTokenizer, Callback, Trainer, TrainingArguments


def __getattr__(name: str) -> Any:
    """Load the Python API at its first use: the parts of the package need nothing of it."""
    if name in __all__:
        return getattr(importlib.import_module("shardwise.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
