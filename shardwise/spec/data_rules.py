"""Rules of the section ``data`` that need no file. Imports no torch."""

from __future__ import annotations

from shardwise.config import nearest
from shardwise.errors import require
from shardwise.spec.run import COLUMNS, RunConfig, data_sources
from shardwise.spec.template import OWN_SETTINGS


def check_data(run: RunConfig) -> None:
    """Refuse sources, columns and lengths that contradict each other.

    Raises:
        ConfigError: the key, the rule and what to write.
    """
    for key, given in (("data.train", run.data.train), ("data.eval", run.data.eval)):
        require(
            not isinstance(given, tuple) or len(given) > 0,
            f"{key} = []",
            "names no source of rows",
            f"Give {key}=FILE.jsonl",
        )
    weights = [source.weight for source in data_sources(run.data.train)]
    require(
        None not in weights or not any(weights),
        f"data.train with the weights {weights}",
        "either all sources have a weight or none",
        "Give each a weight, such as {path: FILE, weight: 1}",
    )
    require(
        not any(source.weight for source in data_sources(run.data.eval)),
        "data.eval with weights",
        "rows are evaluated once each",
        "Leave the weights out",
    )
    _check_columns("data.columns", run.data.columns)
    for key, sources in (("data.train", run.data.train), ("data.eval", run.data.eval)):
        for source in data_sources(sources):
            _check_columns(f"columns of {source.path} in {key}", source.columns)
    for name, value in (run.data.chat_template_kwargs or {}).items():
        require(
            name not in OWN_SETTINGS,
            f"data.chat_template_kwargs = {{{name}: {value}}}",
            f"{name} is not for a run to say: rows are rendered whole, and with their own tools",
            "Leave it out; other names reach the chat template",
        )
    length = run.data.max_length
    require(
        run.data.on_long != "split" or length is None or length > 1,
        f"data.on_long = split with data.max_length = {length}",
        "a row of one token has nothing to predict",
        "Use data.max_length=2 or more",
    )
    size = run.data.val_size or None
    require(
        size is None or run.data.eval is None,
        f"data.val_size = {size} and data.eval = {run.data.eval!r}",
        "are two ways to name the rows to evaluate",
        "Give one of them",
    )
    require(
        size is None or size < 1 or size == int(size),
        f"data.val_size = {size}",
        "must be a share below 1, or a whole number of rows",
        f"Use data.val_size={int(size or 0)}",
    )


def _check_columns(key: str, columns: dict[str, str] | None) -> None:
    for known, own in (columns or {}).items():
        near = nearest(known, COLUMNS)
        require(
            known in COLUMNS,
            f"{key} = {{{known}: {own}}}",
            f"{known} is no name of a column that formats have: {', '.join(COLUMNS)}",
            f"Did you mean {near}?" if near else "Write {name that is known: name in the file}",
        )


def check_packing(run: RunConfig) -> None:
    """Refuse packing and grouping where one makes the other pointless.

    Raises:
        ConfigError: the two keys.
    """
    require(
        not (run.data.group_by_length and run.data.packing),
        "data.group_by_length = true with data.packing = true",
        "both are against padding, and packing leaves none to group for",
        "Give one of them",
    )
    require(
        run.data.shuffle or not run.data.group_by_length,
        "data.group_by_length = true with data.shuffle = false",
        "it changes the order of the rows, which is to be that of the file",
        "Give one of them",
    )
