"""Adapters in PEFT's format: where a run keeps them, and how all ranks write one.

``PeftModel.from_pretrained`` reads it, at full size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import write_files
from shardwise.checkpoint.listing import CHECKPOINTS, complete_checkpoints
from shardwise.checkpoint.naming import plain_naming
from shardwise.errors import ConfigError
from shardwise.models.adapter_folder import CONFIG_FILE, is_adapter_folder
from shardwise.models.lora import Adapters
from shardwise.models.shard import Shard

ADAPTER_FOLDER = "adapter"  # inside a checkpoint
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # what PeftModel is, seen from its base model's parameters


def find_adapter(source: Path) -> Path:
    """The adapter that a path means: the folder itself, a run's ``export``, or its newest complete checkpoint's.

    Raises:
        ConfigError: none of them is there.
    """
    own = [source, source / ADAPTER_FOLDER, source / "export"]
    saved = [path / ADAPTER_FOLDER for path in reversed(complete_checkpoints(source / CHECKPOINTS))]
    for folder in (*own, *saved):
        if is_adapter_folder(folder):
            return folder
    if (source / "export" / "config.json").is_file() or (source / "config.json").is_file():
        raise ConfigError(str(source), "is no adapter but a whole model", "There is nothing to merge; use it as it is")
    places = f"{ADAPTER_FOLDER}/, export/ and {CHECKPOINTS}/step-*/{ADAPTER_FOLDER}/"
    rule = f"holds no adapter ({CONFIG_FILE}; looked in it, in {places})"
    raise ConfigError(str(source), rule, "Give a run's output folder or an adapter folder")


def write_adapter(source: Companions, folder: Path, adapters: Adapters, shards: Iterable[Shard]) -> None:
    """Write adapters and the modules trained whole into ``folder``, in fp32, from all ranks together.

    A tied weight that was trained is written under both of its names, since PEFT loads each into a module
    of its own.

    Args:
        source: folder of the base model, which the adapter names, and the tokenizer that is copied.
    """
    aliases: dict[str, list[str]] = {name: [name] for name in adapters.shapes}
    for name, owner in adapters.tied.items():
        aliases[owner].append(name)
    shapes = {_PREFIX + name: adapters.shapes[owner] for owner, names in aliases.items() for name in names}
    named = [
        (_PREFIX + name, shard) for shard in shards for name in aliases.get(shard.layout.name, []) if shard.layout.owned
    ]
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        source.copy_to(folder, with_config=False)
        config = copy.deepcopy(adapters.config)
        config.base_model_name_or_path, config.inference_mode = str(source.model.absolute()), True
        config.save_pretrained(str(folder))
    dist.barrier()
    write_files(folder, {WEIGHTS_FILE: list(shapes)}, plain_naming(shapes, torch.float32), named)
