"""DCP's reader for checkpoints that may come from elsewhere: its index is a pickle, which could name any function."""

from __future__ import annotations

import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from shardwise.checkpoint.listing import INDEX_FILE
from shardwise.errors import CheckpointError


class IndexReader(FileSystemReader):
    """Reads the index with the few classes that it is made of; tensors DCP itself reads as weights only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            CheckpointError: it names something else.
        """
        folder = Path(self.path)
        with (folder / INDEX_FILE).open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise _foreign(type(index).__name__)
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def unlisted_damage(checkpoint: Path) -> str:
    """What in a checkpoint without a list of its files contradicts its index; empty if nothing does.

    The index tells where each tensor lies, and so which files there are and how long each is; not what they hold.

    Raises:
        CheckpointError: an index that would run code.
    """
    try:
        stored = IndexReader(checkpoint).read_metadata().storage_data
        sizes: dict[str, int] = {}
        for place in stored.values():
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        return f"its {INDEX_FILE} is damaged ({type(error).__name__})"
    for name, size in sorted(sizes.items()):
        path = checkpoint / name
        if Path(name).name != name:
            return f"its {INDEX_FILE} names {name}, which is no file of it"
        if not path.is_file():
            return f"it has no {name}"
        if path.stat().st_size != size:
            return f"its {name} has {path.stat().st_size} bytes of {size}"
    return ""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a name in the index stands for: one of DCP's own classes, a size, a dtype, a layout or a path."""
        if module == metadata.__name__:
            found = getattr(metadata, name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath  # only said to be where it was written
        known = {
            ("torch", "Size"): torch.Size,
            ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
            (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        }
        if (module, name) not in known:
            raise _foreign(f"{module}.{name}")
        return known[module, name]


def _foreign(name: str) -> CheckpointError:
    return CheckpointError(INDEX_FILE, f"it names {name}, which belongs in no checkpoint", "Do not use this checkpoint")
