"""``dataset.GeneratorDataset``: rows from Python, with columns by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, count, islice
from typing import Any, NoReturn

from shardwise.api.messages import unknown
from shardwise.errors import ConfigError
from shardwise.mindspore.arguments import check_number, tell

Row = dict[str, Any]  # column -> value
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
_JOINING = "join the rows in the source, or give files to data.train with their weights"
_ABSENT = {
    "apply": "call the function with the data set",
    "bucket_batch_by_length": "TrainingArguments(group_by_length=True) puts rows of like length together",
    "concat": _JOINING,
    "flat_map": _JOINING,
    "padded_batch": "rows are padded by the Trainer; use batch()",
    "save": "rows are not written; shardwise data prepare tokenises a file ahead",
    "split": "data.val_size sets rows aside for evaluation",
    "zip": _JOINING,
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
        self._stream: _Stream = lambda: map(self._named, islice(self._rows(), num_samples))
        self._columns = list(names)
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
        result.batch_size_given, result._drops_remainder = check_number("batch_size", batch_size), drop_remainder
        if drop_remainder:
            result.keys_given["drop_last"] = True
        return result

    def repeat(self, count: int | None = None) -> GeneratorDataset:
        """Let an epoch go through what is there so far ``count`` times."""
        if count in (None, -1):
            raise ConfigError(f"repeat({count})", "would never end an epoch", "Use TrainingArguments(epochs=...)")
        assert count is not None
        times = check_number("repeat", count)
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
        inputs = self._checked(input_columns) or self._columns[:1]
        outputs = _names(output_columns) or inputs

        def step(row: Row) -> Row:
            values: tuple[Any, ...] = tuple(row[name] for name in inputs)
            for function in functions:
                result = function(*values)
                values = result if isinstance(result, tuple) else (result,)
            left = {name: value for name, value in row.items() if name not in inputs}
            return left | dict(zip(outputs, values, strict=True))

        left = [name for name in self._columns if name not in inputs]
        return self._with_rows(lambda rows: (step(row) for row in rows), left + outputs)

    def filter(
        self, predicate: Callable[..., Any], input_columns: str | Sequence[str] | None = None, **more: Any
    ) -> GeneratorDataset:
        """Keep the rows of which ``predicate``, called with the values of the columns (all by default), is true."""
        _look_at("filter", more, ["predicate", "input_columns"])
        if self.batch_size_given is not None:
            raise ConfigError(
                "filter() after batch()", "would leave batches of several sizes", "Call it before batch()"
            )
        inputs = self._checked(input_columns) or list(self._columns)

        def kept(rows: Iterator[Row]) -> Iterator[Row]:
            return (row for row in rows if predicate(*(row[name] for name in inputs)))

        return self._with_rows(kept, self._columns)

    def rename(self, input_columns: str | Sequence[str], output_columns: str | Sequence[str]) -> GeneratorDataset:
        """Give columns other names, in the order in which both are given."""
        old, new = self._checked(input_columns), _names(output_columns)
        if len(old) != len(new):
            rule = f"there are {len(old)} input_columns for {len(new)} names"
            raise ConfigError(f"output_columns = {new}", rule, "Give one name for each column")
        names = dict(zip(old, new, strict=True))
        columns = [names.get(name, name) for name in self._columns]
        if len(set(columns)) < len(columns):
            raise ConfigError(f"output_columns = {new}", f"would name the columns {columns}", "Give each its own name")

        def renamed(rows: Iterator[Row]) -> Iterator[Row]:
            return ({names.get(name, name): value for name, value in row.items()} for row in rows)

        return self._with_rows(renamed, columns)

    def project(self, columns: str | Sequence[str]) -> GeneratorDataset:
        """Keep these columns alone."""
        kept = self._checked(columns)
        return self._with_rows(lambda rows: ({name: row[name] for name in kept} for row in rows), kept)

    def take(self, count: int = -1) -> GeneratorDataset:
        """Use only the first rows, or after :meth:`batch` the first batches; -1: all of them."""
        stop = None if count == -1 else check_number("take", count)
        return self._changed(lambda stream: lambda: islice(stream(), stop))

    def skip(self, count: int) -> GeneratorDataset:
        """Leave out the first rows, or after :meth:`batch` the first batches."""
        start = check_number("skip", count)
        return self._changed(lambda stream: lambda: islice(stream(), start, None))

    def _with_rows(self, change: Callable[[Iterator[Row]], Iterator[Row]], columns: list[str]) -> GeneratorDataset:
        """A copy with other rows; ``change`` turns a run of rows into another, which in a batch is as long."""
        result, stream = self._copy(), self._stream
        if self._is_cut:
            result._stream = lambda: (tuple(change(iter(part))) for part in stream())
        else:
            result._stream = lambda: change(stream())
        result._columns = list(columns)
        return result

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

    def __iter__(self) -> Iterator[Row]:
        """The rows of an epoch, as dictionaries, in the order of the source."""
        yield from chain.from_iterable(self._stream()) if self._is_cut else self._stream()

    def create_dict_iterator(
        self, num_epochs: int = 1, output_numpy: bool = False, do_copy: bool = False
    ) -> Iterator[Row]:
        """The rows as dictionaries, ``num_epochs`` times (-1: without end); values are Python's own."""
        yield from chain.from_iterable(self for _ in _epochs(num_epochs))

    def create_tuple_iterator(
        self,
        columns: str | Sequence[str] | None = None,
        num_epochs: int = 1,
        output_numpy: bool = False,
        do_copy: bool = False,
    ) -> Iterator[tuple[Any, ...]]:
        """The rows as tuples of the values of ``columns`` (all by default), else as :meth:`create_dict_iterator`."""
        names = self._checked(columns) or list(self._columns)
        for row in self.create_dict_iterator(num_epochs):
            yield tuple(row[name] for name in names)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a data set of MindSpore has and this one has not."""
        if name in _ABSENT:
            raise ConfigError(f"GeneratorDataset.{name}", f"is not there: {_ABSENT[name]}")
        raise AttributeError(f"GeneratorDataset has no attribute {name!r}")

    def _copy(self) -> GeneratorDataset:
        result = copy(self)
        result.keys_given = dict(self.keys_given)
        return result

    def _checked(self, columns: str | Sequence[str] | None) -> list[str]:
        """The names that are given, each of a column."""
        names = _names(columns)
        unknown_columns = [name for name in names if name not in self._columns]
        if unknown_columns:
            rule = f"the columns are {', '.join(self._columns)}"
            raise ConfigError(f"input_columns = {unknown_columns}", rule, "Name one of them")
        return names

    def _rows(self) -> Iterator[Any]:
        source = self._source
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            return (source[index] for index in range(len(source)))
        return iter(source() if callable(source) else source)

    def _named(self, row: Any) -> Row:
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


def _epochs(number: int) -> Iterable[int]:
    return count() if number == -1 else range(check_number("num_epochs", number))


def _look_at(function: str, more: dict[str, Any], known: list[str]) -> None:
    """Say why an argument has no effect; refuse those that would change what is trained, and unknown ones."""
    for name, value in more.items():
        if name in _NO_EFFECT:
            tell(function, name, value, _NO_EFFECT[name])
        elif name in _REFUSED:
            if value is not None:
                raise ConfigError(f"{function}({name}=...)", f"is not supported: {_REFUSED[name]}", "Leave it out")
        else:
            raise unknown(function, name, value, [*known, *_REFUSED, *_NO_EFFECT])
