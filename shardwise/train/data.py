"""The rows of a run on every rank: read or tokenised by one, opened or received by the others."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardwise.data.child import SMALL_BYTES, ready
from shardwise.data.memory import MemoryData, memory_records
from shardwise.data.mixing import combine, sources_of
from shardwise.data.prepared import keep_tokenizer, open_prepared, size_of, tokenizer_folder
from shardwise.data.rows import Rows, Source, load_rows, survey_rows
from shardwise.data.source import Record
from shardwise.data.store import joined
from shardwise.errors import ConfigError
from shardwise.models.tokenizer import load_tokenizer
from shardwise.parallel.agreement import from_rank_0, on_all_ranks, on_one_machine
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, Sources, data_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FEW_ROWS = 10_000  # of a script's data set, which each rank holds
_HELD = ".held-"  # begins the names of folders of one run's rows
_LEFT_SECONDS = 86400.0  # untouched for so long, one was left by a killed run
Say = Callable[[str], None]


class DataReader:
    """Reads the rows of a run; every method is to be called by all ranks.

    Args:
        memory: what a script holds instead of files; None under ``shardwise train``.
        cache: the folder of prepared data, None for a user without a home.
        processes: that tokenise what is not prepared yet.
        say: tells the user, on rank 0.
    """

    def __init__(
        self, run: RunConfig, plan: Plan, memory: MemoryData | None, cache: Path | None, processes: int, say: Say
    ) -> None:
        self._run, self._model = run, plan.model
        self._memory, self._is_script = memory or MemoryData(), memory is not None
        self._cache, self._processes, self._say = cache, processes, say

    def train_rows(self) -> tuple[Rows, Rows | None]:
        """The rows to train on, and those that ``data.val_size`` sets apart for evaluation.

        Raises:
            ShardwiseError: rank 0's refusal, on every rank.
        """
        data = self._run.data
        found = combine(self._read(data.train, data.max_samples), self._run)
        rows, apart = found.rows, found.apart
        if apart is not None:
            total = len(apart) + sum(map(len, found.parts))
            # A script may evaluate by itself whatever the strategy is.
            is_idle = not self._is_script and self._run.eval.strategy == "no"
            purpose = " and not evaluated: eval.strategy is no" if is_idle else " for evaluation"
            self._say(f"data.val_size: {len(apart)} of {total} rows are set apart{purpose}")
        if len(found.parts) > 1:
            for source, part, count in zip(data_sources(data.train), found.parts, found.counts, strict=True):
                share = f"{count / len(rows):.1%} of an epoch, each row {count / len(part):.2f} times"
                self._say(f"data      {source.path}: {len(part)} rows, {share}")
        if not rows.supervised.any():  # of what is left of them
            rule = "sets all rows with supervised tokens apart, there is nothing to learn"
            raise ConfigError(f"data.val_size = {data.val_size}", rule, "Use a smaller one")
        return rows, apart

    def eval_rows(self) -> Rows | None:
        """The rows of ``data.eval``, None where it is not given.

        Raises:
            ShardwiseError: rank 0's refusal, on every rank.
        """
        parts = self._read(self._run.data.eval, None)
        return joined(parts) if parts else None

    def _read(self, given: Sources, max_samples: int | None) -> list[Rows]:
        model = self._model
        sources = sources_of(given, self._run, model.vocab_size, model.max_position_embeddings, max_samples)
        return [self._read_one(source) for source in sources]

    def _read_one(self, source: Source) -> Rows:
        found = from_rank_0(lambda: self._find(source))
        if isinstance(found, Rows):
            return found
        held = source.name in self._memory.datasets
        try:
            return self._opened(source, found, held)
        finally:
            if held and dist.get_rank() == 0:
                shutil.rmtree(found, ignore_errors=True)  # what is mapped stays until the last rank lets it go

    def _opened(self, source: Source, found: Path, held: bool) -> Rows:
        """The rows of a prepared folder. ``held``: it goes as soon as they are opened, which one machine's ranks alone
        survive: on a network's file system the others would lose what they have mapped.
        """
        try:
            rows, told = open_prepared(found)
        except (OSError, ValueError, KeyError):
            rows, told = None, {"notes": []}
        shared = not held or on_one_machine()
        if not on_all_ranks(shared and rows is not None):  # other machines do not see this one's cache
            self._say(f"data      {source.name}: not every machine sees {found}, so each rank holds its rows")
            rows = from_rank_0(lambda: open_prepared(found)[0])
        assert rows is not None
        for note in told["notes"]:
            self._say(note)
        return rows

    def _find(self, source: Source) -> Rows | Path:
        """On rank 0: the rows, or the folder that they have been prepared in."""
        path, memory = source.name, self._memory
        if path in memory.datasets:
            dataset = memory.datasets[path]
            records = memory_records(dataset, path, source.max_samples)
            is_small = hasattr(dataset, "__len__") and len(dataset) <= _FEW_ROWS
            folder = None if is_small else self._held_folder(source)
            if folder is None:
                return load_rows(source, lambda: self._tokenizer(source), records, self._say)
            return self._spill(source, records, folder)
        kept = self._with_folder(source)
        if kept is not None:
            folder = ready(kept, self._cache, self._processes, self._say)
            if folder is not None:
                return folder
        return load_rows(source, lambda: self._tokenizer(source), None, self._say)

    def _with_folder(self, source: Source) -> Source | None:
        """The source with a tokenizer that lies in a folder; None where a script's own cannot be put into one."""
        own = self._memory.tokenizer
        if own is None:
            return source
        if self._cache is None or size_of(source) <= SMALL_BYTES:
            return None
        try:
            folder = keep_tokenizer(own, self._cache)
        except (ConfigError, OSError) as error:
            self._say(f"{source.name}: rank 0 tokenises, and each rank holds the rows: {error}")
            return None
        return replace(source, run=source.run.model_copy(update={"tokenizer": str(folder)}))

    def _held_folder(self, source: Source) -> Path | None:
        """A folder of this run alone in the cache, None where that cannot be written to."""
        if self._cache is None:
            return None
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            _sweep(self._cache)
            return Path(tempfile.mkdtemp(dir=self._cache, prefix=_HELD))
        except OSError as error:
            self._say(f"{source.name}: rows stay in memory: {self._cache} cannot be written to ({error.strerror})")
            return None

    def _spill(self, source: Source, records: Iterable[Record], folder: Path) -> Path:
        """Rows of memory, tokenised one after the other into a folder."""
        try:
            survey_rows(source, lambda: self._tokenizer(source), records, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _tokenizer(self, source: Source) -> PreTrainedTokenizerBase:
        own: PreTrainedTokenizerBase | None = self._memory.tokenizer
        return own if own is not None else load_tokenizer(tokenizer_folder(source))


def _sweep(cache: Path) -> None:
    """Remove the folders that killed runs have left."""
    for folder in cache.glob(f"{_HELD}*"):
        with suppress(OSError):  # another run may be faster
            touched = max(entry.stat().st_mtime for entry in (folder, *folder.iterdir()))
            if time.time() - touched > _LEFT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
