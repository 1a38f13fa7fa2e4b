"""Rows that a script holds in memory, as the same records that a file gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from shardwise.data.source import Record
from shardwise.errors import ConfigError

TRAIN_ROWS, EVAL_ROWS = "<train_dataset>", "<eval_dataset>"  # stand for file names in run.yaml and in messages


@dataclass(frozen=True)
class MemoryData:
    """What a script hands over instead of files: data sets by the name that stands for them, and a tokenizer."""

    datasets: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None


def memory_records(dataset: Any, name: str, max_records: int | None = None) -> Iterator[Record]:
    """The rows of a data set in its own order, at most ``max_records``, one by one; ``line`` counts them from 1.

    Args:
        dataset: a list, another iterable, a function that returns one (a generator function), or an object with
            ``__len__`` and ``__getitem__`` (a data set of torch or of the library ``datasets``). Each row is a
            mapping; arrays and tensors in it become lists. What is None is left out: a table of the library
            ``datasets`` has every key of a column in every row.
        name: the name of the argument, for messages.

    Raises:
        ConfigError: no data set, or a row that is no mapping.
    """
    rows = islice(_iterate(dataset, name), max_records)
    return (Record(number, _plain_row(row, name, number)) for number, row in enumerate(rows, start=1))


def _iterate(dataset: Any, name: str) -> Iterator[Any]:
    if isinstance(dataset, Mapping):
        wrong = f"{name} of type {type(dataset).__name__} (keys {', '.join(map(str, list(dataset)[:3]))})"
        raise ConfigError(wrong, "is a mapping, not a list of rows", "Give one of its values, such as data['train']")
    if isinstance(dataset, Iterable):
        return iter(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):  # torch's have no end of their own
        return (dataset[index] for index in range(len(dataset)))
    if isinstance(dataset, Callable):  # type: ignore[arg-type]
        return _iterate(dataset(), name)
    rule = "is no data set: expected a file name, a list, an iterable, or an object with __len__ and __getitem__"
    raise ConfigError(f"{name} of type {type(dataset).__name__}", rule, "Give a list of dictionaries")


def _plain_row(row: Any, name: str, number: int) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        remedy = 'Such as {"input": ..., "output": ...} or {"messages": [...]}; a GeneratorDataset names its columns'
        raise ConfigError(f"{name}, row {number}", f"is a {type(row).__name__}, expected a dictionary", remedy)
    return plain_row(row)


def plain_row(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row without what is None (a table has every key of a column in every row), arrays and tensors as lists."""
    return {str(key): _plain(value) for key, value in row.items() if value is not None}


def _plain(value: Any) -> Any:
    """Lists and numbers of Python for arrays, tensors and numpy scalars."""
    if isinstance(value, dict):
        # Templates ask whether a key is there. A turn without text has content None in every format.
        return {key: _plain(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
