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
