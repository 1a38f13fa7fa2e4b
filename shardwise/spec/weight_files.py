"""Which safetensors files of a folder are its weights, by their names. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """File -> the tensors that the index takes from it; None: all that it holds.

    ``model.safetensors`` is the weights where it is there, as transformers has it; else what the index names; else
    the only safetensors file. Of several without an index nobody can say which are meant, and a backup beside the
    weights would silently replace them.

    Raises:
        CheckpointError: no such file, several without an index, an index that is broken, names a missing file or one
            outside of the folder.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return {folder / WEIGHTS_FILE: None}
    index = folder / INDEX_FILE
    if index.exists():
        return _indexed(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(str(folder), "it holds no .safetensors file", "Use a folder with safetensors weights")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        rule = f"it holds {len(files)} .safetensors files ({names}) and no {INDEX_FILE} that says which are the weights"
        raise CheckpointError(str(folder), rule, f"Name the weights {WEIGHTS_FILE}, or copy the index there")
    return {files[0]: None}


def _indexed(folder: Path, index: Path) -> dict[Path, list[str] | None]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[Path, list[str] | None] = {}
        for name, file in weight_map.items():
            if file in ("", "..") or Path(file).name != file or "\0" in file:  # an index may come from anywhere
                rule = f"places {name} in {file!r}, which is no file of its folder"
                raise CheckpointError(str(index), rule, "Do not use it")
            names = by_file.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(str(index), f"not a readable index ({error})", "Copy it again") from error
    missing = sorted(file.name for file in by_file if not file.is_file())
    if missing:
        rule = f"{INDEX_FILE} names {len(by_file)} weight files, of which {len(missing)} are absent: "
        raise CheckpointError(
            str(folder), rule + ", ".join(missing[:4]), "Copy them there, or download the model again"
        )
    return by_file
