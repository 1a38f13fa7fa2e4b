"""``dataset.config``: the seed of the rows' order; how they are read needs no settings."""

from __future__ import annotations

from shardwise.api.ambient import AMBIENT
from shardwise.errors import ConfigError
from shardwise.mindspore.arguments import tell

_READ_ONCE = "rows are read once, by rank 0"


def set_seed(seed: int) -> None:
    """Set ``data.seed``, of which the order of shuffled rows depends.

    Raises:
        ConfigError: no whole number, or one below 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"config.set_seed({seed!r})", "must be a whole number, 0 or above", "Correct it")
    AMBIENT.set("data.seed", seed, "dataset.config.set_seed")


def set_num_parallel_workers(num: int) -> None:
    """Say why the number of workers has no effect."""
    tell("config.set_num_parallel_workers", "num", num, _READ_ONCE)


def set_prefetch_size(size: int) -> None:
    """Say why the size of a queue has no effect."""
    tell("config.set_prefetch_size", "size", size, _READ_ONCE)


def set_auto_num_workers(enable: bool) -> None:
    """Say why the search for a number of workers has no effect."""
    tell("config.set_auto_num_workers", "enable", enable, _READ_ONCE)


def set_enable_shared_mem(enable: bool) -> None:
    """Say why shared memory has no effect."""
    tell("config.set_enable_shared_mem", "enable", enable, _READ_ONCE)
