"""Data that is tokenised before a job starts, so that no rank waits for another that tokenises."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.data.child import ready
from shardwise.data.mixing import sources_of
from shardwise.data.prepared import data_folder, num_cores
from shardwise.data.rows import Source
from shardwise.log import say
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig


def run_sources(run: RunConfig, plan: Plan) -> list[Source]:
    """Everything that a run reads, the rows to train on first."""
    sizes = plan.model.vocab_size, plan.model.max_position_embeddings
    train = sources_of(run.data.train, run, *sizes, run.data.max_samples)
    return train + sources_of(run.data.eval, run, *sizes)


def prepare_ahead(run: RunConfig, plan: Plan, environ: Mapping[str, str]) -> None:
    """Tokenise what is large and not in the cache yet, in a child with a process a core.

    Raises:
        ShardwiseError: what is wrong with the data.
    """
    for source in run_sources(run, plan):
        ready(source, data_folder(environ), num_cores(), say)
