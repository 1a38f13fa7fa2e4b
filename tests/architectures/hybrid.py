"""Tensor x pipeline parallel of the runtime itself against one process, one architecture after the other.

Four ranks over gloo train a small copy for three steps under tp 2 x pp 2, as ``shardwise check`` does: losses,
gradient norms and every gradient of the first step are compared with plain transformers in one process.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwise.check import small
from shardwise.errors import ShardwiseError
from shardwise.launch.culprit import is_connection_error
from shardwise.testing import PRELOAD, RankError, run_distributed
from tests.architectures.survey import default_config

TIME_LIMIT = 600.0  # on a machine that does other things too
GLOBAL_BATCH_SIZE = 4
ONE_LENGTH = "exact on rows of one length"
_LENGTHS, _ONE_LENGTH = (3, 12), (12, 12)  # of rows, shortest and longest


@dataclass
class HybridFinding:
    """What the four ranks showed: ``exact``, ``refused: RULE``, ``differs by ...`` or the error of one process."""

    name: str
    result: str = "not reached"
    error: float | None = None
    seconds: float = 0.0


def examine(name: str) -> HybridFinding:
    """Run one architecture on four ranks of its own, so that what ends one ends no other.

    Where rows of unlike lengths differ, rows of one length are tried: behind the end of a row there may be positions
    that a choice (the tokens that an indexer picks among equal scores) depends on in one process too.
    """
    start = time.monotonic()
    finding = _run(name, _LENGTHS)
    if finding.result.startswith("differs"):
        again = _run(name, _ONE_LENGTH)
        if again.result == "exact":
            finding = HybridFinding(name, ONE_LENGTH, again.error)
    finding.seconds = round(time.monotonic() - start, 1)
    return finding


def _run(name: str, lengths: tuple[int, int]) -> HybridFinding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            finding: HybridFinding = run_distributed(_work, 4, name, folder, lengths, timeout=TIME_LIMIT)[0]
        except RankError as error:
            # What a rank raised itself, before the others lost it.
            raised = sorted(Path(folder).glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
            finding = HybridFinding(name, raised[0].read_text() if raised else str(error).splitlines()[0])
    return finding


def survey(names: Sequence[str]) -> Iterator[HybridFinding]:
    """The findings of ``names`` as they come; ranks are forked from a process that has all imported that they need."""
    PRELOAD.extend(["transformers.conversion_mapping", "shardwise.check.ranks", __name__])
    return map(examine, names)


def _work(rank: int, name: str, folder: str, lengths: tuple[int, int]) -> HybridFinding | None:
    small._LENGTHS = lengths
    try:
        return _examined(name)
    except Exception as error:
        if not is_connection_error(error):
            refusal = isinstance(error, ShardwiseError)
            what = f"refused: {getattr(error, 'rule', error)}" if refusal else f"{type(error).__name__}: {error}"
            text = " ".join(what.split())
            Path(folder, f"{rank}.txt").write_text(text[:300], encoding="utf-8")
        raise


def _examined(name: str) -> HybridFinding | None:
    import torch.distributed as dist
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    finding = HybridFinding(name)
    found = _compare(name)
    if dist.get_rank():
        return None
    finding.error = max(found["errors"].values())
    where = found["worst_gradient"]["name"]
    finding.result = "exact" if found["ok"] else f"differs by {finding.error:.1e} at {where}"
    return finding


def _compare(name: str) -> dict[str, Any]:
    """The summary that ``check`` writes."""
    import torch
    import torch.distributed as dist

    from shardwise.check.findings import summarise
    from shardwise.check.ranks import compare_rank
    from shardwise.check.small import SmallModel, _without_chance
    from shardwise.models.shrink import shrink
    from shardwise.models.structure import find_structure, num_predicted
    from shardwise.parallel.agreement import from_rank_0
    from shardwise.spec.run import TrainConfig
    from shardwise.spec.strategy import Strategy, default_stages
    from shardwise.tensor.cache import TableCache

    config, _ = _without_chance(shrink(default_config(name), degree=2))
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        whole = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    num_blocks = find_structure(whole).num_blocks
    copied = SmallModel(config, None, num_blocks, (), num_ids=num_predicted(whole))
    run = SimpleNamespace(train=TrainConfig(optimizer="sgd"))
    strategy = Strategy(pp=2, tp=2, stages=default_stages(num_blocks, 2), reshard=False)
    want = from_rank_0(lambda: _reference(copied, run))
    findings = compare_rank(run, copied, strategy, want, GLOBAL_BATCH_SIZE, TableCache(None))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, findings)
    return summarise(everyone, want, ())


def _reference(copied: Any, run: Any) -> Any:
    from shardwise.check.ranks import _steps
    from shardwise.check.reference import run_reference

    return run_reference(copied, _steps(copied, GLOBAL_BATCH_SIZE), run.train)
