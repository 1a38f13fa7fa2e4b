"""Models and tokenizers by name, as Hugging Face's classes of the same names give them.

A model is only named here: each worker reads its own part of the weights when training starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.api.messages import unknown
from shardwise.errors import ConfigError
from shardwise.front.hub import locate_model
from shardwise.launch.place import preset_tree

# Arguments of from_pretrained: what they set, or why they are accepted or refused.
_KEYS = {"attn_implementation": "attn_implementation", "trust_remote_code": "trust_remote_code"}
_HARMLESS = ("low_cpu_mem_usage", "use_safetensors", "use_cache", "device_map")
_REFUSED = {
    "quantization_config": "quantised weights cannot be trained here",
    "load_in_4bit": "quantised weights cannot be trained here",
    "load_in_8bit": "quantised weights cannot be trained here",
    "torch_dtype": "weights are kept as TrainingArguments(bf16=...) says, the export has the dtype of the input",
    "dtype": "weights are kept as TrainingArguments(bf16=...) says, the export has the dtype of the input",
    "config": "the configuration is that of the model folder",
    "state_dict": "the weights are those of the model folder",
    "revision": "a revision cannot be chosen; download it to a folder",
    "cache_dir": "the cache is the hub's own (HF_HOME)",
}


@dataclass(frozen=True)
class ModelHandle:
    """A model that a Trainer is to train: its name, where it was found, and keys of ``run.yaml`` about it."""

    name: str
    folder: Path
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        """The model's configuration, as transformers reads it."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder)

    def tree(self) -> dict[str, Any]:
        """The keys of ``run.yaml`` that this model sets."""
        return {"model": str(self.folder), **self.keys}


class AutoModel:
    """Names a causal language model. No weights are read in this process."""

    @staticmethod
    def from_pretrained(name: str | os.PathLike[str], **options: Any) -> ModelHandle:
        """A model by path, by name under the models folder (``models_dir``, SHARDWISE_MODELS_DIR), or on the hub.

        Raises:
            ConfigError: not found, or an option that is unknown or cannot be followed.
        """
        folder = find(name, options.pop("models_dir", None))
        return ModelHandle(os.fspath(name), folder, _keys(options))

    @staticmethod
    def from_config(name: str | os.PathLike[str], **options: Any) -> ModelHandle:
        """As :meth:`from_pretrained`, with random weights: a folder with ``config.json`` is enough."""
        folder = find(name, options.pop("models_dir", None), only_config=True)
        return ModelHandle(os.fspath(name), folder, _keys(options) | {"model_init": "random"})


AutoModelForCausalLM = AutoModel


class AutoTokenizer:
    """Finds a model's tokenizer."""

    @staticmethod
    def from_pretrained(name: str | os.PathLike[str], **options: Any) -> Any:
        """The Hugging Face tokenizer of a model, found as :meth:`AutoModel.from_pretrained` finds the model."""
        from transformers import AutoTokenizer as HuggingFaceTokenizer

        folder = find(name, options.pop("models_dir", None), only_config=True)
        return HuggingFaceTokenizer.from_pretrained(folder, **options)


def find(name: str | os.PathLike[str], models_dir: str | None = None, *, only_config: bool = False) -> Path:
    """The folder of a model or tokenizer; the command line's ``--models-dir`` wins over ``models_dir``.

    Raises:
        ConfigError: found nowhere.
    """
    base = preset_tree(os.environ).get("models_dir") or models_dir or os.environ.get("SHARDWISE_MODELS_DIR")
    return locate_model(os.fspath(name), base, only_config=only_config)


def _keys(options: dict[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, value in options.items():
        if name in _KEYS:
            keys[_KEYS[name]] = value
        elif name in _REFUSED:
            if value not in (None, False, "auto"):
                raise ConfigError(f"from_pretrained({name}={value!r})", _REFUSED[name], "Leave it out")
        elif name not in _HARMLESS:
            raise unknown("from_pretrained", name, value, [*_KEYS, *_HARMLESS, *_REFUSED])
    return keys
