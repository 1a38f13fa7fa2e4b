"""An epoch of packed batches against trl's packing of the same rows: seconds and fill, side by side in one run.

trl packs a data set once, into a table; here each step is packed as it comes, up to the tensors that a model takes.
Both use best-fit decreasing. ``python -m benchmarks.packing``; needs trl and datasets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import islice

import numpy as np

from shardwise.data.loader import Loader, LoaderSettings
from shardwise.data.rows import Row

LENGTH = 2048


def make_rows(num_rows: int) -> list[Row]:
    """Rows of lengths as chats have them: the median 200 tokens, a few at the limit."""
    generator = np.random.default_rng(0)
    lengths = np.minimum(LENGTH, np.exp(generator.normal(5.3, 0.8, num_rows)).astype(int) + 8)
    ids = [generator.integers(0, 32000, length).astype(np.int32) for length in lengths]
    return [Row(index, index + 1, row, row) for index, row in enumerate(ids)]


def ours(rows: list[Row], batch: int) -> float:
    """One epoch of batches; the share of their tokens that are no padding."""
    loader = Loader(rows, LoaderSettings(batch, 8, packing=True, pack_length=LENGTH))
    steps = list(islice(((b.num_input_tokens, b.num_computed_tokens) for b in loader.batches()), loader.num_steps(1)))
    return sum(real for real, _ in steps) / sum(computed for _, computed in steps)


def theirs(rows: list[Row]) -> Callable[[], float]:
    """trl's packing of the same rows, as a function that makes a table and gives its fill."""
    from datasets import Dataset, disable_caching, disable_progress_bars
    from trl.data_utils import pack_dataset

    disable_caching()
    disable_progress_bars()
    table = Dataset.from_dict({"input_ids": [row.input_ids for row in rows]})

    def pack() -> float:
        packed = pack_dataset(table, LENGTH, "bfd", {"keep_in_memory": True})
        return sum(len(row.input_ids) for row in rows) / (len(packed) * LENGTH)

    return pack


def main() -> None:
    """Print the medians of a few rounds by turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=256, help="rows of a step")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rows = make_rows(given.rows)
    sides: dict[str, Callable[[], float]] = {"shardwise": lambda: ours(rows, given.batch), "trl": theirs(rows)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    fills: dict[str, float] = {}
    for _ in range(given.rounds):
        for name, pack in sides.items():
            began = time.perf_counter()
            fills[name] = pack()
            seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        print(f"{name:10} {statistics.median(values):7.2f} s for {given.rows} rows, {fills[name]:.1%} filled")
    print(f"ratio      {statistics.median(seconds['shardwise']) / statistics.median(seconds['trl']):.2f}")


if __name__ == "__main__":
    main()
