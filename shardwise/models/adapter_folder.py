"""Folders in PEFT's format: the base model that one names, and both loaded by plain peft."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from shardwise.errors import CheckpointError, ConfigError

CONFIG_FILE = "adapter_config.json"


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / CONFIG_FILE).is_file()


def base_folder(adapter: Path, base: Path | None = None) -> Path:
    """The model folder that an adapter is for: ``base``, else the one that it names.

    Raises:
        ConfigError: it is not there, or holds no weights.
    """
    try:
        named = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(str(adapter / CONFIG_FILE), f"cannot be read ({error})", "Copy it again") from None
    folder = base or Path(named or "")
    remedy = "Give the folder of the base model with --base FOLDER"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"base model {str(folder)!r} of {adapter}", "no such model folder", remedy)
    if not any(folder.glob("*.safetensors")):
        rule = "holds no weights (the adapter was trained on random ones)"
        raise ConfigError(f"base model {str(folder)!r} of {adapter}", rule, remedy)
    return folder


def load_with_adapter(adapter: Path, base: Path) -> Any:
    """The base model with its adapter beside it, in fp32 and evaluation mode.

    Raises:
        CheckpointError: the adapter does not fit the base model.
    """
    from peft import PeftModel

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    remedy = "Name its own base model"
    # Recorded: what peft and transformers deprecate is no news for a user, but a tensor that lacks is.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            loaded = PeftModel.from_pretrained(model, str(adapter)).eval()
        except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise CheckpointError(str(adapter), f"does not fit the model in {base} ({first})", remedy) from None
    missing = next((str(w.message) for w in told if "missing adapter keys" in str(w.message)), None)
    if missing is not None:
        raise CheckpointError(str(adapter), f"does not fit the model in {base} ({missing.splitlines()[0]})", remedy)
    return loaded
