"""The rows of a run on every rank: read or tokenised by one, opened or received by the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.data.child import ready
from shardwise.data.memory import MemoryData, memory_records
from shardwise.data.mixing import mixed, sources_of, split_off
from shardwise.data.prepared import open_prepared, tokenizer_folder
from shardwise.data.rows import Rows, Source, load_rows
from shardwise.errors import ConfigError
from shardwise.models.tokenizer import load_tokenizer
from shardwise.parallel.agreement import from_rank_0, on_all_ranks
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, Sources, data_sources

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]


class DataReader:
    """Reads the rows of a run; every method is to be called by all ranks.

    Args:
        memory: what a script holds instead of files.
        cache: the folder of prepared data, None for a user without a home.
        processes: that tokenise what is not prepared yet.
        say: tells the user, on rank 0.
    """

    def __init__(
        self, run: RunConfig, plan: Plan, memory: MemoryData | None, cache: Path | None, processes: int, say: Say
    ) -> None:
        self._run, self._model = run, plan.model
        self._memory = memory or MemoryData()
        self._cache, self._processes, self._say = cache, processes, say

    def train_rows(self) -> tuple[Rows, Rows | None]:
        """The rows to train on, and those that ``data.val_size`` sets apart for evaluation.

        Raises:
            ShardwiseError: rank 0's refusal, on every rank.
        """
        data = self._run.data
        given = data_sources(data.train)
        parts = self._read(data.train, data.max_samples)
        apart = None
        if data.val_size:
            # Before the mixture, so that no row that it repeats stands on both sides.
            seed = self._run.train.seed if data.seed is None else data.seed
            whole, _ = mixed(parts, [None] * len(parts))
            rest, apart = split_off(whole, data.val_size, seed)
            parts = _by_part(rest, parts, [source.path for source in given])
            self._say(f"data.val_size: {len(apart)} of {len(whole)} rows are set apart for evaluation")
        rows, counts = mixed(parts, [source.weight for source in given])
        if len(parts) > 1:
            for source, part, count in zip(given, parts, counts, strict=True):
                share = f"{count / len(rows):.1%} of an epoch, each row {count / len(part):.2f} times"
                self._say(f"data      {source.path}: {len(part)} rows, {share}")
        return rows, apart

    def eval_rows(self) -> Rows | None:
        """The rows of ``data.eval``, None where it is not given.

        Raises:
            ShardwiseError: rank 0's refusal, on every rank.
        """
        parts = self._read(self._run.data.eval, None)
        return mixed(parts, [None] * len(parts))[0] if parts else None

    def _read(self, given: Sources, max_samples: int | None) -> list[Rows]:
        model = self._model
        sources = sources_of(given, self._run, model.vocab_size, model.max_position_embeddings, max_samples)
        return [self._read_one(source) for source in sources]

    def _read_one(self, source: Source) -> Rows:
        found = from_rank_0(lambda: self._find(source))
        if isinstance(found, Rows):
            return found
        try:
            rows, told = open_prepared(found)
        except (OSError, ValueError, KeyError):
            rows, told = None, {"notes": []}
        if not on_all_ranks(rows is not None):  # other machines do not see this one's cache
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
            records = memory_records(memory.datasets[path], path, source.max_samples)
            return load_rows(source, lambda: self._tokenizer(source), records, self._say)
        if memory.tokenizer is None:
            folder = ready(source, self._cache, self._processes, self._say)
            if folder is not None:
                return folder
        return load_rows(source, lambda: self._tokenizer(source), None, self._say)

    def _tokenizer(self, source: Source) -> PreTrainedTokenizerBase:
        own: PreTrainedTokenizerBase | None = self._memory.tokenizer
        return own if own is not None else load_tokenizer(tokenizer_folder(source))


def _by_part(rest: Rows, parts: list[Rows], names: list[str]) -> list[Rows]:
    """What is left of each of ``parts``, whose rows ``rest`` holds some of, in order.

    Raises:
        ConfigError: nothing is left of one.
    """
    assert rest.order is not None
    left, first = [], 0
    for name, part in zip(names, parts, strict=True):
        inside = (rest.order >= first) & (rest.order < first + len(part))
        if not inside.any():
            raise ConfigError(name, f"data.val_size sets all of its {len(part)} rows apart", "Use a smaller one")
        left.append(part.take(rest.order[inside] - first))
        first += len(part)
    return left
