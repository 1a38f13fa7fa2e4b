"""Rows of several sources in one epoch, and rows that are set apart for evaluation. No row is lost by either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.data.rows import Source
from shardwise.data.store import Rows, joined
from shardwise.errors import ConfigError
from shardwise.spec.run import RunConfig, Sources, data_sources
from shardwise.units import format_exact

# Keep the random numbers of a split and of a mixture apart from each other and from those of an epoch's order.
_SPLIT_STREAM, _REPEAT_STREAM = 0x5B117, 0x33B
_MAX_REPEATS = 1000  # of a row in an epoch; weights that ask for more are a mistake, and would fill the memory


def sources_of(
    given: Sources, run: RunConfig, vocab_size: int, max_positions: int | None, max_samples: int | None = None
) -> list[Source]:
    """What ``data.train`` or ``data.eval`` names, each with its own format; ``max_samples`` counts for each."""
    found = []
    for source in data_sources(given):
        own_keys = {key: getattr(source, key) for key in ("format", "columns") if getattr(source, key) is not None}
        data = run.data.model_copy(update=own_keys)
        own = run.model_copy(update={"data": data})
        found.append(Source(Path(source.path), own, vocab_size, max_positions, max_samples))
    return found


@dataclass(frozen=True)
class Epoch:
    """What the rows of several sources come to.

    Attributes:
        rows: those of an epoch, in file order or evenly mixed.
        apart: those that ``data.val_size`` sets apart for evaluation, None without it.
        parts: of each source what is left to train on.
        counts: of each source its rows in an epoch, repeats included.
    """

    rows: Rows
    apart: Rows | None
    parts: list[Rows]
    counts: list[int]


def combine(parts: list[Rows], run: RunConfig) -> Epoch:
    """The epoch over the rows of each source of ``data.train``.

    Raises:
        ConfigError: ``data.val_size`` leaves nothing of a source, or weights that repeat rows without end.
    """
    given, apart = data_sources(run.data.train), None
    if run.data.val_size:
        # Before the mixture, so that no row that it repeats stands on both sides.
        seed = run.train.seed if run.data.seed is None else run.data.seed
        rest, apart = split_off(joined(parts), run.data.val_size, seed)
        parts = _by_part(rest, parts, [source.path for source in given])
    rows, counts = mixed(parts, [source.weight for source in given])
    return Epoch(rows, apart, parts, counts)


def mixed(parts: Sequence[Rows], weights: Sequence[float | None]) -> tuple[Rows, list[int]]:
    """The rows of an epoch over several sources, and how many of each there are.

    Without weights every row stands there once, source after source. With them source i makes up the share
    ``weight_i / sum(weights)``, in an even mixture: the source that is largest for its weight stands there once, the
    others as often as it takes, so that every row is there at least once. Which rows stand there once more than others
    of their source is drawn once, so that an epoch is the same set each time.

    Raises:
        ConfigError: a row would stand there more than 1,000 times.
    """
    whole = joined(parts)
    if None in weights:
        return whole, [len(part) for part in parts]
    shares = np.array(weights, dtype=np.float64)
    lengths = np.array([len(part) for part in parts], dtype=np.float64)
    # The tiny part keeps 3 / 0.1 * 0.1 from being 4 rows.
    wanted = np.ceil((lengths / shares).max() * shares - 1e-9)
    _check_repeats(wanted, lengths, weights)
    counts = wanted.astype(np.int64)
    places, keys = [], []
    first = 0
    for number, (part, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
        repeats, rest = divmod(count, len(part))
        order = np.random.Philox(np.random.SeedSequence(number, spawn_key=(_REPEAT_STREAM,))).random_raw(len(part))
        more = np.sort(np.argsort(order, kind="stable")[:rest])
        places.append(first + np.concatenate([np.tile(np.arange(len(part)), repeats), more]))
        keys.append((np.arange(count) + 0.5) / count)
        first += len(part)
    even = np.argsort(np.concatenate(keys), kind="stable")
    return whole.take(np.concatenate(places)[even]), counts.tolist()


def _check_repeats(counts: np.ndarray, lengths: np.ndarray, weights: Sequence[float | None]) -> None:
    """Refuse ``counts`` of rows of an epoch, one a source of ``lengths`` rows, that repeat a row too often."""
    worst = int(np.argmax(counts / lengths))
    if counts[worst] / lengths[worst] > _MAX_REPEATS:
        rule = f"source {worst + 1} has {lengths[worst]:,.0f} rows and would need {counts[worst]:,.15g} in an epoch; "
        rule += f"each may stand there {_MAX_REPEATS:,} times at most"
        raise ConfigError(f"data.train with the weights {list(weights)}", rule, "Use weights that are nearer, or none")


def split_off(rows: Rows, size: float, seed: int) -> tuple[Rows, Rows]:
    """``(rest, set apart)``: a share of the rows (``size`` below 1) or so many, drawn by ``seed``, in file order.

    The stream of a Philox generator never changes, so the same rows are set apart on every machine.

    Raises:
        ConfigError: no row would be left to train on.
    """
    number = max(1, round(size * len(rows))) if size < 1 else int(size)
    if number >= len(rows):
        rule = f"of {len(rows)} rows {number} would be set apart, and none be left to train on"
        remedy = f"Use at most {len(rows) - 1}" if len(rows) > 1 else "Give more rows"
        raise ConfigError(f"data.val_size = {format_exact(size)}", rule, remedy)
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_SPLIT_STREAM,))).random_raw(len(rows))
    drawn = np.argsort(words, kind="stable")
    return rows.take(np.sort(drawn[number:])), rows.take(np.sort(drawn[:number]))


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
