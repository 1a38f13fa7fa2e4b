"""Where a model is: a path, a folder of models, then a model hub. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.launch.paths import check_path
from shardwise.spec.model import find_model

# What a run needs of a hub's folder: no pickled weights, no other formats of the same.
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-][\w.-]*")


def locate_model(name: str, models_dir: str | Path | None, *, only_config: bool = False) -> Path:
    """The folder of a model: ``name`` as a path, under ``models_dir``, or fetched from the hub.

    The hub is Hugging Face's, or what the variable HF_ENDPOINT names; what it gave is kept in its own cache.

    Args:
        only_config: fetch everything but the weights.

    Raises:
        ConfigError: found nowhere; the message lists where it was looked for.
    """
    check_path("model", name)
    try:
        return find_model(name, models_dir)
    except ConfigError as error:
        if not _HUB_NAME.fullmatch(name) or Path(name).exists():
            raise
        not_here = error
    try:
        return _fetch(name, only_config)
    except Exception as error:  # of the network, of the hub, of its library: one message for all
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        rule = f"{not_here.rule}; the hub does not give it either ({type(error).__name__}: {reason[:200]})"
        raise ConfigError(not_here.value, rule, not_here.remedy) from None


def _fetch(name: str, only_config: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [pattern for pattern in _PATTERNS if not (only_config and pattern == "*.safetensors")]
    return Path(snapshot_download(name, allow_patterns=patterns))
