"""Data that is tokenised once: by several processes, into a folder that is named by all that its content depends on.

A prepared folder is written whole or not at all, and one job at a time writes it; the others wait for it and open it.
Every process of a machine maps the same files, so that a rank holds none of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.data.encode import RowEncoder
from shardwise.data.format import Format
from shardwise.data.readers import files_of
from shardwise.data.rows import Source, chunks, parts_of, write_rows
from shardwise.data.source import Item, Raw, local, show
from shardwise.data.store import Rows, RowsWriter, flattened, open_rows
from shardwise.data.tokenise import Chunk, Limits, tokenise
from shardwise.errors import ConfigError, LaunchError
from shardwise.lifeline import die_with_parent
from shardwise.models.tokenizer import load_tokenizer
from shardwise.spec.cache import code_hash, write_whole
from shardwise.spec.template import template_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Keys of the section data on which a row's tokens do not depend.
_ORDER_KEYS = {"train", "eval", "val_size", "max_samples", "packing", "group_by_length", "shuffle", "seed", "drop_last"}
# Of a model's folder all files count that a tokenizer may be made of; these hold weights.
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".index.json")
_TEMPLATES = "additional_chat_templates"  # a folder in it
_SHARED = ("hub", "tokenizers", "digests")  # folders in the cache; what lies in them has an age of its own
_KEPT_SECONDS = 30 * 86400.0  # a folder that nobody has opened for so long goes when another is written
_LARGE_BYTES = 64 << 20  # of a file that takes a while to hash
_SETTLED_SECONDS = 2.0  # a younger file may change again within the resolution of its time
_AHEAD = 4  # chunks a process that wait for it
Task = tuple[int, str, Format | None, list[Item]]  # number of the file, its name, its format, items that follow
Progress = Callable[[int, float | None], None]  # (rows so far, share of the bytes or None where unknown)


def tokenizer_folder(source: Source) -> Path:
    """Where the tokenizer of a run lies."""
    return Path(source.run.tokenizer or source.run.model)


def key_of(source: Source, cache: Path | None = None) -> str:
    """Names the tokens of a source: by the bytes of its files, the tokenizer, the settings and the code.

    What the bytes of a large file come to is kept in ``cache`` for as long as the file is not touched.

    Raises:
        ConfigError: a file that cannot be read.
    """
    digest = hashlib.sha256()
    # Rows that would be refused are in no folder but that of a run that leaves them out: see _serves.
    settings = source.run.data.model_dump(mode="json", exclude=_ORDER_KEYS | {"on_bad_rows"})
    settings["on_long"] = "drop" if source.run.data.on_long == "refuse" else source.run.data.on_long
    template = None if source.run.chat_template is None else template_text(source.run.chat_template)
    sizes = [source.vocab_size, source.max_positions, source.max_samples]
    versions = [version("transformers"), version("tokenizers"), code_hash(("data", "models", "spec"))]
    digest.update(json.dumps([settings, template, sizes, versions], sort_keys=True).encode())
    for file in [*_tokenizer_files(local(tokenizer_folder(source))), *files_of(source.path)]:
        digest.update(f"\0{file}\0".encode("utf-8", "surrogateescape"))
        digest.update(_bytes_digest(local(file), cache).encode())
    return digest.hexdigest()


def _tokenizer_files(folder: Path) -> list[Path]:
    """Every file that a tokenizer in ``folder`` may be read from; a class of its own may read any."""
    found = [*folder.iterdir(), *(folder / _TEMPLATES).glob("*")]
    hidden_or_weights = (path.name.startswith(".") or path.name.endswith(_WEIGHTS) for path in found)
    return sorted(path for path, is_out in zip(found, hidden_or_weights, strict=True) if not is_out and path.is_file())


def keep_tokenizer(tokenizer: PreTrainedTokenizerBase, cache: Path) -> Path:
    """A folder in ``cache`` from which this tokenizer is read again, named by what it holds.

    Raises:
        ConfigError: what is read from the folder is another tokenizer.
        OSError: the cache cannot be written to.
    """
    place = cache / "tokenizers"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".") as draft:
        name = f"tokenizer = {type(tokenizer).__name__}"
        try:
            tokenizer.save_pretrained(draft)
            same = _told(load_tokenizer(Path(draft))) == _told(tokenizer)
        except Exception as error:  # whatever a tokenizer of foreign code raises
            raise ConfigError(name, f"cannot be saved to a folder ({type(error).__name__}: {error})") from None
        if not same:
            raise ConfigError(name, "is another one when it is saved to a folder and read again")
        digest = hashlib.sha256()
        for file in _tokenizer_files(Path(draft)):
            digest.update(f"\0{file.relative_to(draft)}\0{_hashed(file)}".encode())
        folder = place / digest.hexdigest()
        if not folder.is_dir():
            with suppress(OSError):  # another job may have been faster
                Path(draft).rename(folder)
                Path(draft).mkdir()  # for its own end
        with suppress(OSError):
            os.utime(folder)  # it is used now
    return folder


def _told(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """All that a tokenizer's tokens and templates depend on.

    Raises:
        ValueError: one that is no description of itself, such as a class written by hand.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it has no tokenizer.json")
    described = json.loads(backend.to_str())
    described.pop("padding"), described.pop("truncation")  # of the last call, not of the tokenizer
    return type(tokenizer), described, tokenizer.special_tokens_map, tokenizer.chat_template


def _bytes_digest(file: Path, cache: Path | None) -> str:
    """A hash of what a file holds; of a folder the empty text."""
    if file.is_dir():
        return ""
    found = _stat(file)
    memo = None
    if cache is not None and found.st_size >= _LARGE_BYTES and time.time() - found.st_mtime > _SETTLED_SECONDS:
        place = [str(file.resolve()), found.st_size, found.st_mtime_ns, found.st_ino]
        memo = cache / "digests" / hashlib.sha256(repr(place).encode("utf-8", "surrogateescape")).hexdigest()
        with suppress(OSError):
            return memo.read_text(encoding="ascii")
    digest = _hashed(file)
    if memo is not None:
        write_whole(memo, digest)
    return digest


def _hashed(file: Path) -> str:
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "blake2b").hexdigest()
    except OSError as error:
        raise _unreadable(file, error) from None


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(show(file), f"the file cannot be read ({error.strerror})", "Correct its rights, or its link")


def size_of(source: Source) -> int:
    """Bytes of a source's files.

    Raises:
        ConfigError: a file that cannot be read.
    """
    return sum(_stat(local(file)).st_size for file in files_of(source.path))


def find_prepared(source: Source, cache: Path | None) -> Path | None:
    """The folder with the tokens of a source, None where there is none that opens."""
    if cache is None or not os.path.isdir(cache):  # of a folder that may not be looked into Path.is_dir raises
        return None
    folder = cache / key_of(source, cache)
    return folder if _serves(folder, source) else None


def _serves(folder: Path, source: Source) -> bool:
    """Whether a folder holds all that was written, and no row was left out that this run refuses.

    A full disk or a cleaner may have taken a part of it; ``data show`` may have written it, which refuses nothing.
    """
    try:
        counts, data = open_prepared(folder)[1]["counts"], source.run.data
        is_bad = counts["bad"] and data.on_bad_rows == "refuse"
        is_long = counts["refused"] or (counts["dropped"] and data.on_long == "refuse")
        return not (is_bad or (is_long and not source.is_look))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_prepared(folder: Path) -> tuple[Rows, dict[str, Any]]:
    """The rows of a prepared folder, mapped, and what :func:`shardwise.data.rows.write_rows` said of them.

    Raises:
        OSError, ValueError, KeyError: it is not all there.
    """
    rows, more = open_rows(folder)
    with suppress(OSError):
        os.utime(folder)  # the age of a folder is the time since it was last used
    return rows, {"notes": list(more["notes"]), "counts": dict(more["counts"])}


def prepare(source: Source, cache: Path, processes: int, progress: Progress | None = None) -> Path:
    """Tokenise a source into its folder in ``cache``, unless it is there and opens; the folder.

    Another job that prepares the same at this moment is waited for. To be called in a process without threads of its
    own: its children are forked.

    Raises:
        ConfigError: as :func:`shardwise.data.rows.load_rows`.
        OSError: the cache cannot be written to.
    """
    cache.mkdir(parents=True, exist_ok=True)
    key = key_of(source, cache)
    folder = cache / key
    with _locked(cache / f"{key}.lock"):
        if _serves(folder, source):
            return folder
        _forget_old(cache)
        unfinished = Path(tempfile.mkdtemp(dir=cache, prefix=f".{key[:16]}-"))
        try:
            _write(source, unfinished, processes, progress)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                unfinished.rename(folder)
            except OSError:
                if not folder.is_dir():  # without locks another job may have been faster
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock, waiting for it; a file system without locks has the rename alone."""
    with path.open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits holds the file itself, and finds the folder


def _forget_old(cache: Path) -> None:
    """Remove what nobody has used for a month, and what a killed job has left."""
    shared = [cache / name for name in _SHARED]
    own = (entry for entry in cache.iterdir() if entry.is_dir() and entry not in shared)
    for entry in [*own, *(inner for folder in shared for inner in folder.glob("*"))]:
        with suppress(OSError):
            if time.time() - entry.stat().st_mtime <= _KEPT_SECONDS:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def _write(source: Source, folder: Path, processes: int, progress: Progress | None) -> None:
    parts = list(parts_of(source.path))
    encode = source.encoder(lambda: load_tokenizer(tokenizer_folder(source)))
    if processes > 1 and _needs_tokenizer(source):
        _ = encode.tokenizer  # loaded once, before the processes part
    total = size_of(source)

    def found() -> Iterator[tuple[int, str, Chunk]]:
        rows = seen = 0
        work = chunks(parts, source.run.data.format, source.max_samples, source.run.data.columns)
        for number, file, chunk, num_bytes in _in_parallel(work, encode, source.limits, processes):
            rows, seen = rows + chunk.num_items, seen + num_bytes
            if progress is not None:
                progress(rows, seen / total if seen and total else None)
            yield number, file, chunk

    writer = RowsWriter(folder)
    told = write_rows(source, found(), writer)
    writer.finish([file for file, _ in parts], told)


def _needs_tokenizer(source: Source) -> bool:
    """Whether the first row is text."""
    data = source.run.data
    first = next(chunks(list(parts_of(source.path)), data.format, 1, data.columns), None)
    return first is not None and first[2] not in (None, "tokens")


class _Worker:
    """What a forked process has of its parent: nothing of it is sent."""

    encode: RowEncoder
    limits: Limits


def _work(task: Task) -> tuple[int, str, Chunk, int]:
    number, file, kind, items = task
    num_bytes = sum(len(item.data) for item in items if isinstance(item, Raw))
    return number, file, flattened(tokenise(items, file, kind, _Worker.encode, _Worker.limits)), num_bytes


def _enter(parent: int) -> None:
    """Begin a forked process: Ctrl-C is its parent's to answer, without which it does not stay."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


def _in_parallel(
    tasks: Iterator[Task], encode: RowEncoder, limits: Limits, processes: int
) -> Iterator[tuple[int, str, Chunk, int]]:
    """The results of ``tasks`` in their order; a bounded number of them waits at any time."""
    _Worker.encode, _Worker.limits = encode, limits
    if processes <= 1:
        yield from map(_work, tasks)
        return
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, fork, initializer=_enter, initargs=(os.getpid(),))
    waiting: deque[Future[tuple[int, str, Chunk, int]]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(_work, task))
            if len(waiting) >= processes * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        rule = "a process that tokenises rows was killed (the memory may be full)"
        raise LaunchError(
            f"{processes} processes", rule, "Use fewer of them: shardwise data prepare --processes 1"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
