"""What ``data show`` answers: a run's rows as the model will see them, before anything is trained. Loads no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from shardwise.data.child import SMALL_BYTES, prepare_shown
from shardwise.data.format import IGNORED
from shardwise.data.mixing import Epoch, combine
from shardwise.data.order import steps_per_epoch
from shardwise.data.prepared import find_prepared, open_prepared, size_of, tokenizer_folder
from shardwise.data.rows import Row, Rows, Source, survey_rows
from shardwise.front.preparing import run_sources
from shardwise.log import say
from shardwise.machine import available_cores
from shardwise.models.tokenizer import load_tokenizer
from shardwise.spec.data_files import data_folder
from shardwise.spec.plan import Plan, batch_equation
from shardwise.spec.run import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = 1
_BINS = 10


def survey(run: RunConfig, plan: Plan, num_shown: int, environ: Mapping[str, str], console: Console) -> dict[str, Any]:
    """The answer of ``data show``: the first rows in pieces, lengths, counts by reason, tokens and steps of an epoch.

    Bad rows are left out and counted here, whatever ``data.on_bad_rows`` says; so are rows that are too long.

    Raises:
        ConfigError: no row can be used.
    """
    lenient = run.data.model_copy(update={"on_bad_rows": "skip", "on_long": _lenient_length(run), "eval": None})
    sources = run_sources(run.model_copy(update={"data": lenient}), plan)
    found = [_read(replace(source, is_look=True), environ, console) for source in sources]
    whole = combine([rows for rows, _ in found], run)
    decode = _Decoder(sources[0])
    return {
        "schema": SCHEMA,
        "sources": [
            {"path": source.name, "rows": len(part), "rows_in_epoch": count, **told["counts"]}
            for source, (part, told), count in zip(sources, found, whole.counts, strict=True)
        ],
        "notes": [note for _, told in found for note in told["notes"]],
        "refused": _refusals(run, [told["counts"] for _, told in found]),
        "rows": [decode.row(row) for part, _ in found for row in part[:num_shown]][:num_shown],
        "lengths": lengths(whole.rows.lengths),
        "epoch": epoch(run, plan, whole),
    }


def _lenient_length(run: RunConfig) -> str:
    return "drop" if run.data.on_long == "refuse" else run.data.on_long


def _refusals(run: RunConfig, counts: list[dict[str, Any]]) -> list[str]:
    """Why training on these rows would be refused, by the settings of the run."""
    bad, long = sum(sum(found["bad"].values()) for found in counts), sum(found["dropped"] for found in counts)
    whole = sum(found["refused"] for found in counts)
    remedy = "data.on_long=truncate cuts them, data.on_long=drop leaves them out"
    told = []
    if bad and run.data.on_bad_rows == "refuse":
        told.append(f"{bad} bad rows: correct them, or leave them out with data.on_bad_rows=skip")
    if long and run.data.on_long == "refuse":
        told.append(f"{long} rows are too long: {remedy}")
    if whole:
        told.append(f"{whole} rows are too long and not learned as a whole, so they cannot be split: {remedy}")
    return told


def _read(source: Source, environ: Mapping[str, str], console: Console) -> tuple[Rows, dict[str, Any]]:
    cache = data_folder(environ)
    folder = find_prepared(source, cache)
    if folder is None and cache is not None and size_of(source) > SMALL_BYTES:
        try:
            folder = prepare_shown(source, cache, available_cores(), console)
        except OSError as error:
            say(f"{source.name}: tokens are not kept, since {cache} cannot be written to ({error.strerror})")
    if folder is not None:
        return open_prepared(folder)
    return survey_rows(source, lambda: load_tokenizer(tokenizer_folder(source)))


class _Decoder:
    """Rows as text, where there is a tokenizer; rows of token ids are shown as numbers where there is none."""

    def __init__(self, source: Source) -> None:
        folder = tokenizer_folder(source)
        has_one = any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        self._tokenizer: PreTrainedTokenizerBase | None = load_tokenizer(folder) if has_one else None

    def row(self, row: Row) -> dict[str, Any]:
        """``pieces``: (text, whether it is supervised), in order; neighbours of one kind are one piece."""
        # The first label predicts nothing: no token comes before it.
        learned = np.concatenate([[False], row.labels[1:] != IGNORED])
        borders = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(learned)]
        pieces = [
            (self._text(row.input_ids[start:end].tolist()), bool(learned[start])) for start, end in pairwise(borders)
        ]
        place = {"file": row.file, "line": row.line}
        return place | {"tokens": len(learned), "supervised": int(learned.sum()), "pieces": pieces}

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids)) + " "
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def lengths(values: np.ndarray) -> dict[str, Any]:
    """Quantiles of lengths in tokens, and a histogram: ``(from, to, rows)``, both ends included."""
    edges = np.unique(np.linspace(values.min(), values.max() + 1, _BINS + 1).astype(np.int64))
    counts, _ = np.histogram(values, edges)
    bars = [(int(low), int(high) - 1, int(count)) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
    quantiles = {f"p{q}": int(np.percentile(values, q, method="lower")) for q in (50, 95, 99)}
    return {"shortest": int(values.min()), **quantiles, "longest": int(values.max()), "histogram": bars}


def epoch(run: RunConfig, plan: Plan, found: Epoch) -> dict[str, Any]:
    """Rows, tokens and steps of an epoch, and the steps of the run."""
    rows = found.rows
    steps = steps_per_epoch(len(rows), plan.global_batch_size, run.data.drop_last)
    epochs = run.train.epochs
    return {
        "rows": len(rows),
        "set_apart": 0 if found.apart is None else len(found.apart),
        "tokens": int(rows.lengths.sum()),
        "supervised_tokens": int(rows.supervised.sum()),
        "batch": batch_equation(plan),
        "steps": steps,
        "steps_of_run": run.train.max_steps if epochs is None else epochs * steps,
    }
