"""Data that is tokenised before a job starts, so that no rank waits for another that tokenises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.data.child import prepare_shown, ready
from shardwise.data.mixing import sources_of
from shardwise.data.prepared import open_prepared
from shardwise.data.rows import Source
from shardwise.errors import ConfigError
from shardwise.front.resolve import check_data, locate_data, prepare
from shardwise.launch.beacon import beacon
from shardwise.launch.place import Nodes
from shardwise.log import say
from shardwise.machine import available_cores
from shardwise.spec.data_files import data_folder
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig


def run_sources(run: RunConfig, plan: Plan) -> list[Source]:
    """Everything that a run reads, the rows to train on first."""
    sizes = plan.model.vocab_size, plan.model.max_position_embeddings
    train = sources_of(run.data.train, run, *sizes, run.data.max_samples)
    return train + sources_of(run.data.eval, run, *sizes)


def prepare_ahead(run: RunConfig, plan: Plan, environ: Mapping[str, str], nodes: Nodes) -> None:
    """Tokenise what is large and not in the cache yet, in a child with a process a core.

    The other machines of ``nodes``, which wait meanwhile, are told how far this is.

    Raises:
        ShardwiseError: what is wrong with the data.
    """
    with beacon(nodes) as counted:
        for source in run_sources(run, plan):
            ready(source, data_folder(environ), available_cores(), say, counted)


def prepare_data(tree: dict[str, Any]) -> tuple[RunConfig, Plan]:
    """The run and its plan for a look at its rows: neither weights nor devices have to be here.

    Raises:
        ConfigError, PlanError: what could not be trained.
    """
    run, plan = prepare(tree, command="check", searches=False)
    run = locate_data(run)
    check_data(run)
    return run, plan


def prepare_all(
    run: RunConfig, plan: Plan, processes: int | None, environ: Mapping[str, str], console: Console
) -> Iterator[Path]:
    """The folder of each source of a run, tokenised now if it is not there. Loads transformers.

    Raises:
        ConfigError: what is wrong with the data, or a cache that cannot be written to.
    """
    cache = data_folder(environ)
    if cache is None:
        raise ConfigError("HOME", "is not set, so there is no cache to keep tokens in", "Set XDG_CACHE_HOME")
    for source in run_sources(run, plan):
        try:
            folder = prepare_shown(source, cache, processes or available_cores(), console)
            rows, told = open_prepared(folder)
        except OSError as error:
            remedy = "Make room, or set XDG_CACHE_HOME to another folder"
            raise ConfigError(str(cache), f"cannot be written to ({error.strerror})", remedy) from None
        for note in told["notes"]:
            say(note)
        say(f"{source.name}: {len(rows)} rows, {int(rows.lengths.sum())} tokens")
        yield folder
