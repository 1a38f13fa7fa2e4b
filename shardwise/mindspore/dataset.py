"""``dataset.GeneratorDataset``: rows from Python, with columns by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any

from shardwise.api.messages import unknown
from shardwise.errors import ConfigError
from shardwise.log import say

# A stream of the data set, to be gone through any number of times: of rows, and once cut of batches (tuples of rows).
_Stream = Callable[[], Iterator[Any]]

_NO_EFFECT = {
    "num_parallel_workers": "rows are read once, by rank 0",
    "python_multiprocessing": "rows are read once, by rank 0",
    "max_rowsize": "rows are read once, by rank 0",
    "num_shards": "the Trainer hands the rows out to the data ranks",
    "shard_id": "the Trainer hands the rows out to the data ranks",
    "column_types": "text and token ids keep their types",
    "cache": "rows are kept in memory anyway",
    "offload": "rows are read once, by rank 0",
}
_REFUSED = {
    "sampler": "rows are taken in their order, or shuffled with data.seed",
    "schema": "columns are named by column_names",
    "per_batch_map": "batches are made by the Trainer; use map()",
}


class GeneratorDataset:
    """Rows of a Python source.

    Args:
        source: a function that returns an iterable, an iterable, or an object with ``__getitem__`` and ``__len__``.
            Each row is a tuple with a value for each column, or one value if there is one column.
        column_names: names of the columns. Text columns become question and answer (``input`` and ``output``, and
            other names), ``input_ids`` are tokens.
        shuffle: whether each epoch has another order; None: as MindSpore has it, only where ``source`` has
            ``__getitem__``.
        num_samples: use only the first rows.

    Attributes:
        batch_size_given: rows of :meth:`batch`, None before.
        keys_given: keys of the section ``data`` that the data set asks for.

    Raises:
        ConfigError: no source, no columns, an unknown argument, or one that cannot be followed.
    """

    def __init__(
        self,
        source: Any,
        column_names: str | Sequence[str] | None = None,
        *,
        shuffle: bool | None = None,
        num_samples: int | None = None,
        **more: Any,
    ) -> None:
        _look_at("GeneratorDataset", more, ["source", "column_names", "shuffle", "num_samples"])
        names = [column_names] if isinstance(column_names, str) else list(column_names or ())
        if not names:
            raise ConfigError("column_names", "missing", 'Name the columns, such as ["input", "output"]')
        if not (callable(source) or isinstance(source, Iterable) or hasattr(source, "__getitem__")):
            rule = "must be a function, an iterable, or have __getitem__ and __len__"
            raise ConfigError(f"source of type {type(source).__name__}", rule, "Give a generator function")
        self._source, self._source_columns = source, names
        self._stream: _Stream = lambda: islice(self._rows(), num_samples)
        self._columns = list(names)
        self._steps: list[Callable[[dict[str, Any]], dict[str, Any]]] = []
        self._drops_remainder, self._is_cut = False, False
        self.batch_size_given: int | None = None
        random_access = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        self.keys_given: dict[str, Any] = {"shuffle": random_access if shuffle is None else shuffle}

    def batch(self, batch_size: int, drop_remainder: bool = False, **more: Any) -> GeneratorDataset:
        """Take ``batch_size`` rows on each data rank at a time; it must be the Trainer's ``batch_size``.

        From here on :meth:`take`, :meth:`skip` and :meth:`repeat` count batches. The Trainer then joins their rows: a
        short batch inside of an epoch is filled up with the rows that follow.
        """
        _look_at("batch", more, ["batch_size", "drop_remainder"])
        if self.batch_size_given is not None:
            raise ConfigError("batch() after batch()", "would make batches of batches", "Call it once")
        result = self._copy()
        result.batch_size_given, result._drops_remainder = _positive("batch_size", batch_size), drop_remainder
        if drop_remainder:
            result.keys_given["drop_last"] = True
        return result

    def repeat(self, count: int | None = None) -> GeneratorDataset:
        """Let an epoch go through what is there so far ``count`` times."""
        if count in (None, -1):
            raise ConfigError(f"repeat({count})", "would never end an epoch", "Use TrainingArguments(epochs=...)")
        assert count is not None
        times = _positive("repeat", count)
        return self._changed(lambda stream: lambda: chain.from_iterable(stream() for _ in range(times)))

    def shuffle(self, buffer_size: int | None = None) -> GeneratorDataset:
        """Another order in each epoch, over all rows, whatever the size of the buffer."""
        result = self._copy()
        result.keys_given["shuffle"] = True
        return result

    def map(
        self,
        operations: Callable[..., Any] | Sequence[Callable[..., Any]],
        input_columns: str | Sequence[str] | None = None,
        output_columns: str | Sequence[str] | None = None,
        **more: Any,
    ) -> GeneratorDataset:
        """Apply functions to columns, one after the other; each takes and returns as many values as it is given."""
        _look_at("map", more, ["operations", "input_columns", "output_columns"])
        functions = [operations] if callable(operations) else list(operations)
        inputs = _names(input_columns) or self._columns[:1]
        outputs = _names(output_columns) or inputs
        unknown_columns = [name for name in inputs if name not in self._columns]
        if unknown_columns:
            rule = f"the columns are {', '.join(self._columns)}"
            raise ConfigError(f"input_columns = {unknown_columns}", rule, "Name one of them")

        def step(row: dict[str, Any]) -> dict[str, Any]:
            values: tuple[Any, ...] = tuple(row[name] for name in inputs)
            for function in functions:
                result = function(*values)
                values = result if isinstance(result, tuple) else (result,)
            left = {name: value for name, value in row.items() if name not in inputs}
            return left | dict(zip(outputs, values, strict=True))

        result = self._copy()
        result._steps.append(step)
        result._columns = [name for name in self._columns if name not in inputs] + outputs
        return result

    def take(self, count: int = -1) -> GeneratorDataset:
        """Use only the first rows, or after :meth:`batch` the first batches; -1: all of them."""
        stop = None if count == -1 else _positive("take", count)
        return self._changed(lambda stream: lambda: islice(stream(), stop))

    def skip(self, count: int) -> GeneratorDataset:
        """Leave out the first rows, or after :meth:`batch` the first batches."""
        start = _positive("skip", count)
        return self._changed(lambda stream: lambda: islice(stream(), start, None))

    def _changed(self, change: Callable[[_Stream], _Stream]) -> GeneratorDataset:
        """A copy with another stream; where batches have been asked for, the stream is one of batches from here on.

        They are cut no earlier: which rows are left over as the remainder of an epoch is for the Trainer to say, that
        knows their order.
        """
        result = self._copy()
        if self.batch_size_given is not None and not self._is_cut:
            rows, size, drops = self._stream, self.batch_size_given, self._drops_remainder
            result._stream = lambda: (part for part in _batches(rows(), size) if len(part) == size or not drops)
            result._is_cut = True
        result._stream = change(result._stream)
        return result

    def get_batch_size(self) -> int:
        """Rows of a batch, 1 where :meth:`batch` has not been called."""
        return self.batch_size_given or 1

    def get_dataset_size(self) -> int:
        """Number of batches in an epoch."""
        rows, size = sum(1 for _ in self), self.get_batch_size()
        return rows // size if self.keys_given.get("drop_last") else -(-rows // size)

    def get_col_names(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows of an epoch, as dictionaries, in the order of the source."""
        for row in chain.from_iterable(self._stream()) if self._is_cut else self._stream():
            value = self._named(row)
            for step in self._steps:
                value = step(value)
            yield value

    def create_dict_iterator(self, num_epochs: int = 1, output_numpy: bool = False) -> Iterator[dict[str, Any]]:
        """The rows as dictionaries, ``num_epochs`` times; values are Python's own."""
        for _ in range(_positive("num_epochs", num_epochs)):
            yield from self

    def _copy(self) -> GeneratorDataset:
        result = copy(self)
        result._steps, result.keys_given = list(self._steps), dict(self.keys_given)
        return result

    def _rows(self) -> Iterator[Any]:
        source = self._source
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            return (source[index] for index in range(len(source)))
        return iter(source() if callable(source) else source)

    def _named(self, row: Any) -> dict[str, Any]:
        names = self._source_columns
        values = row if isinstance(row, tuple) else (row,)
        if len(values) != len(names):
            rule = f"the source gives {len(values)} values a row, and column_names has {len(names)}"
            raise ConfigError(f"column_names = {names}", rule, "Give a tuple with one value for each column")
        return dict(zip(names, values, strict=True))


def _batches(rows: Iterator[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """``size`` rows at a time; the last may be shorter."""
    while part := tuple(islice(rows, size)):
        yield part


def _names(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r}", "must be a whole number above 0", "Correct it")
    return value


def _look_at(function: str, more: dict[str, Any], known: list[str]) -> None:
    """Say why an argument has no effect; refuse those that would change what is trained, and unknown ones."""
    for name, value in more.items():
        if name in _NO_EFFECT:
            say(f"{function}({name}={value!r}) has no effect: {_NO_EFFECT[name]}")
        elif name in _REFUSED:
            if value is not None:
                raise ConfigError(f"{function}({name}=...)", f"is not supported: {_REFUSED[name]}", "Leave it out")
        else:
            raise unknown(function, name, value, [*known, *_REFUSED, *_NO_EFFECT])
