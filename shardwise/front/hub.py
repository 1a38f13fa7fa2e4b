"""Where a model or a data set is: a path, a folder of models, then a hub. Imports no torch."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.spec.data_files import PACKED, SUFFIXES, data_suffix, named_files
from shardwise.spec.model import find_model
from shardwise.spec.paths import check_path, local_path

# What a run needs of a hub's folder: no pickled weights, no other formats of the same.
_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
_DATA_NAME = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<config>[\w.-]+)(?=:))?(?::(?P<split>[\w.-]+(?:\[[\d:%]+\])?))?"
)
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


def locate_rows(key: str, name: str, models_dir: str | Path | None, cache: Path | None) -> str:
    """The path of the rows that ``name`` stands for: itself, or those of a data set ``org/name[[:config]:split]``.

    Such a data set is looked for under ``models_dir``, as models are, and then fetched by the library ``datasets``,
    which asks Hugging Face's hub or what the variable HF_ENDPOINT names. What it gave is kept in ``cache``. Without a
    split it is ``train``. A name that looks like that of a file stays as it is.

    Args:
        key: names it in messages, such as ``data.train``.

    Raises:
        ConfigError: a data set that is found nowhere.
    """
    found = _DATA_NAME.fullmatch(name)
    plain = found["name"] if found else ""
    if not found or local_path(name).exists() or data_suffix(plain):
        return name
    if not found["split"] and local_path(name).parent.is_dir():  # a file of that folder whose name is wrong
        return name
    split = found["split"] or "train"
    held = _local_rows(key, name, plain, (found["config"], split), models_dir)
    if held is not None:
        return held
    if importlib.util.find_spec("datasets") is None:
        rule = "is no file here, and a data set of the hub needs the package datasets, which is not installed"
        raise ConfigError(f"{key} = {name!r}", rule, "Install it: pip install datasets; or give the path of a file")
    try:
        return _fetch_rows(plain, found["config"], split, cache)
    except Exception as error:  # of the network, of the hub, of its library: one message for all
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        rule = f"is no file here, and the hub does not give it ({type(error).__name__}: {reason[:200]})"
        remedy = "Look at the name and the network (HF_ENDPOINT names a mirror), or give the path of a file"
        raise ConfigError(f"{key} = {name!r}", rule, remedy) from None


def _local_rows(
    key: str, name: str, plain: str, part: tuple[str | None, str], models_dir: str | Path | None
) -> str | None:
    """What holds ``part``, a configuration and a split, of a data set ``plain`` that lies on this machine; None where
    no folder is one of it.

    Raises:
        ConfigError: its folder is here, and has no such split, or not the whole of it.
    """
    bases = [local_path(plain)]
    if models_dir is not None:
        bases += [Path(models_dir).expanduser() / plain, Path(models_dir).expanduser() / Path(plain).name]
    folders = [base for base in bases if base.is_dir()]
    found = next((place for folder in folders if (place := _split_of(folder, *part)) is not None), None)
    # A model may have the name of a data set.
    sets = [folder for folder in folders if not (folder / "config.json").is_file()]
    if found is not None or not sets:
        return found
    folder = sets[0]
    if "[" in part[1]:
        rule = f"a part of a split is taken of data sets that come from a hub alone, and {folder} is here"
        raise ConfigError(f"{key} = {name!r}", rule, f"Leave {part[1][part[1].index('[') :]} out")
    shown = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
    rule = f"the folder {folder} has neither a folder nor a file {'/'.join(filter(None, part))} (it holds {shown})"
    raise ConfigError(f"{key} = {name!r}", rule, "Name a split that is there, or give the path of a file")


def _split_of(folder: Path, config: str | None, split: str) -> str | None:
    """What holds the split of a data set in ``folder``: a folder or a file of that name, or the files that it was cut
    into, as a hub has them; None where nothing does.
    """
    bases = (folder / config, folder / "data" / config) if config else (folder, folder / "data")
    ends = ["", *(end + packing for end in SUFFIXES for packing in ("", *PACKED))]
    found = next((str(base / (split + end)) for base in bases for end in ends if (base / (split + end)).exists()), None)
    if found is not None:
        return found
    stems = [glob.escape(str(base / split)) + "-[0-9]*-of-[0-9]*" for base in bases]
    patterns = [stem + end for stem in stems for end in ends[1:]]
    pattern = next((pattern for pattern in patterns if named_files(Path(pattern))), None)
    if pattern is not None:
        _check_whole(split, named_files(Path(pattern)))
    return pattern


def _check_whole(split: str, files: Sequence[Path]) -> None:
    """
    Raises:
        ConfigError: the files that a split was cut into are not all there, or of two cuts.
    """
    totals = sorted({int(path.name.rpartition("-of-")[2].partition(".")[0]) for path in files})
    if totals != [len(files)]:
        said = " and ".join(map(str, totals))
        rule = f"is cut into {said} files by their names, and {files[0].parent} holds {len(files)}"
        raise ConfigError(f"the split {split}", rule, "Fetch the data set again, or give the path of its files")


def _fetch_rows(name: str, config: str | None, split: str, cache: Path | None) -> str:
    from datasets import load_dataset

    rows = load_dataset(name, config, split=split)
    if cache is None:
        raise OSError("HOME is not set, so there is no cache to keep it in")
    # By its content, as the library names it, so that a data set that changes on the hub is another folder.
    told = hashlib.sha256(f"{name}:{split}:{rows._fingerprint}".encode()).hexdigest()[:16]
    shown = "--".join(re.sub(r"[^\w.-]+", "-", part) for part in (*name.split("/"), config, split) if part)
    folder = cache / "hub" / f"{shown}--{told}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            rows.save_to_disk(str(Path(draft) / "rows"))
            if not folder.is_dir():  # another job may have been faster
                (Path(draft) / "rows").rename(folder)
    with suppress(OSError):
        os.utime(folder)  # what has not been used for long is removed
    return str(folder)
