"""The tensor table of every architecture, beside the one that Hugging Face publishes: what both leave whole and move.

python -m tests.architectures.tensor --degree 2
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.architectures.processes import in_processes
from tests.architectures.survey import architectures, default_config
from tests.architectures.true_sizes import FIRST, UNCOUNTED, at_true_sizes

TIME_LIMIT = 600.0  # on a machine that does other things too


@dataclass
class Count:
    """What a table leaves whole, as a share of the blocks' parameters, and the elements that a rank moves for it."""

    whole: float = 1.0
    moved: float = 0.0

    def no_more_than(self, other: Count) -> bool:
        """Of neither more."""
        return self.whole <= other.whole + 1e-9 and self.moved <= other.moved + 1e-9


@dataclass
class TensorFinding:
    """What the search found for one architecture, and what its published plan does on the same ranks.

    Args:
        result: ``ok``: a table that is right on the executed ranks.
        seconds: of CPU for the search of one kind of block, its trace included.
        same: whether the published plan has the same styles.
        published: None where none is published; ``published_result`` tells whether it is right.
        offered: where ours leaves less whole and moves more: an alternative, right on the executed ranks, that does
            neither leave nor move more than the published plan; None where there is none.
        true_sizes: which table neither leaves nor moves more than the published plan at the sizes of the real model:
            one of :mod:`tests.architectures.true_sizes`.
    """

    name: str
    result: str = "not reached"
    seconds: float = 0.0
    own: Count = field(default_factory=Count)
    same: bool = False
    published: Count | None = None
    published_result: str = ""
    offered: Count | None = None
    true_sizes: str = UNCOUNTED
    styles: dict[str, str] = field(default_factory=dict)
    published_styles: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def examine(name: str, degree: int = 2) -> TensorFinding:
    """The table of an architecture, with what it and the published plan do on ``degree`` simulated ranks."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from shardwise.models.shrink import build_small, shrink
    from shardwise.models.structure import find_structure
    from shardwise.tensor.simulate import reference

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    finding = TensorFinding(name)
    config = default_config(name)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    try:
        small = _small(shrink(config, degree=degree), build_small)
        search, table, own = timed_search(finding, real, small, degree)
    except Exception as error:  # whatever a foreign forward raises
        finding.result = " ".join(f"{getattr(error, 'rule', '') or type(error).__name__ + ': ' + str(error)}".split())
        _publishes(finding, real)
        return finding
    finding.result = "ok"
    structure = find_structure(small)
    finding.styles = {k: v.style.value for k, v in own.modules.items()}
    finding.refused = dict(table.refused)
    want = reference(small)
    finding.own = count(small, structure, own, want)
    theirs = _compare_with_published(finding, small, structure, own, want)
    if finding.same:
        finding.true_sizes = FIRST  # one table at every size
    elif finding.published is not None and finding.published_result == "right":
        beyond, tokens = finding.published.moved - finding.own.moved, want.logits.shape[:2].numel()
        finding.true_sizes = at_true_sizes(search, own, theirs, beyond, tokens)
    if finding.published is not None and verdict(finding) not in (SAME, CHEAPER):
        _look_at_offered(finding, small, degree, want)
    return finding


def _small(config: Any, build: Any) -> Any:
    """In float64 where it runs in that, as the product does it."""
    import torch

    from shardwise.tensor.trace import run

    small = build(config)
    try:
        run(small)
    except RuntimeError:
        small = build(config, torch.float32)
    return small


def timed_search(finding: Any, real: Any, small: Any, degree: int) -> tuple[Any, Any, Any]:
    """The search, its table, and the same on the small copy; notes CPU seconds for a kind of block."""
    from shardwise.tensor.find import TableSearch

    start = time.process_time()
    search = TableSearch(real, small, degree)
    table, own = search.tables()
    finding.seconds = round((time.process_time() - start) / max(len(search.kinds), 1), 2)
    return search, table, own


def _publishes(finding: TensorFinding, model: Any) -> None:
    """Where the search fails: whether there is a published plan for the blocks."""
    from shardwise.models.structure import text_config

    plan = getattr(type(text_config(model)), "base_model_tp_plan", None) or {}
    if any(pattern.startswith("layers.*") or ".*." in pattern for pattern in plan):
        finding.published, finding.published_result = Count(), "not run"


def _compare_with_published(finding: TensorFinding, small: Any, structure: Any, own: Any, want: Any) -> Any:
    """Run the published plan on the same ranks, and count the same things; its table on the small copy."""
    from shardwise.spec.tolerance import PROOF
    from shardwise.tensor.simulate import compare
    from tests.architectures.published import published_table

    theirs, unknown = published_table(small, structure, own)
    if theirs is None:
        return None
    finding.published_styles = {k: v.style.value for k, v in theirs.modules.items()}
    finding.same = finding.styles == finding.published_styles
    finding.published = Count(whole_share(small, structure, theirs))
    try:
        difference = compare(small, theirs, want)
    except Exception as error:
        finding.published_result = " ".join(f"does not run: {type(error).__name__}: {error}".split())[:200]
        return theirs
    finding.published.moved = sum(difference.moved.values())
    right = difference.error <= PROOF
    finding.published_result = "right" if right else f"differs by {difference.error:.1e} at {difference.where}"
    if unknown:
        finding.published_result += f", without {sorted(unknown)}"
    return theirs


def _look_at_offered(finding: TensorFinding, small: Any, degree: int, want: Any) -> None:
    """The table that ``strategy.tp_whole`` leads to at the share that the published plan leaves whole.

    The small copy is the model here, as it is what runs: in the real one other tables may be worth their traffic.
    """
    from shardwise.errors import PlanError
    from shardwise.models.structure import find_structure
    from shardwise.tensor.find import TableSearch

    assert finding.published is not None
    share = min(finding.published.whole + 1e-6, 1.0)  # it was rounded
    try:
        own = TableSearch(small, small, degree).tables(whole=share)[1]
    except PlanError:
        return
    counted = count(small, find_structure(small), own, want)
    if counted.no_more_than(finding.published):
        finding.offered = counted


def count(model: Any, structure: Any, table: Any, want: Any) -> Count:
    """What ``table`` leaves whole and moves on the executed ranks."""
    from shardwise.tensor.simulate import compare

    return Count(whole_share(model, structure, table), sum(compare(model, table, want).moved.values()))


def whole_share(model: Any, structure: Any, table: Any) -> float:
    """The share of the blocks' parameters that every rank holds whole."""
    sizes = {
        name: p.numel() for name, p in model.get_submodule(structure.blocks).named_parameters(prefix=structure.blocks)
    }
    return round(sum(size for name, size in sizes.items() if not table.is_cut(name)) / sum(sizes.values()), 6)


SAME, CHEAPER, TRADE, WORSE = "same", "cheaper", "less whole, moves more", "worse"
NOT_RIGHT, NONE_PUBLISHED, NOT_SPLIT = "published is not right", "none published", "not split"


def verdict(f: TensorFinding) -> str:
    """Ours beside the published plan."""
    if f.result != "ok" or f.own.whole == 1.0:
        return NOT_SPLIT
    if f.published is None:
        return NONE_PUBLISHED
    if f.same:
        return SAME
    if f.published_result != "right":
        return NOT_RIGHT
    if f.own.no_more_than(f.published):
        return CHEAPER
    return TRADE if f.own.whole < f.published.whole else WORSE


def survey(names: Sequence[str], workers: int, degree: int = 2, limit: float = TIME_LIMIT) -> Iterator[TensorFinding]:
    """The findings of ``names`` as they come."""
    import transformers

    import shardwise.models.chain
    import shardwise.tensor.find  # noqa: F401

    transformers.logging.set_verbosity_error()
    for name, finding, reason in in_processes(partial(examine, degree=degree), names, workers, limit):
        yield finding or TensorFinding(name, result=reason)


def line(f: TensorFinding) -> str:
    """One architecture in one line."""
    styles = sorted(set(f.styles.values()) - {"vocab_embedding", "vocab_head"})
    theirs = "" if f.published is None else f": {f.published_result} {f.published.whole:.3f} {f.published.moved:.0f}"
    own = f"{f.seconds:.1f} s a kind, whole {f.own.whole:.3f} moved {f.own.moved:.0f} {styles}"
    other = "" if f.offered is None else f" | offered {f.offered.whole:.3f} {f.offered.moved:.0f}"
    return f"{f.name:26} {f.result[:300]} {own} | {verdict(f)}{theirs}{other}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a model type (may be given several times)")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    for finding in survey(options.only or architectures(), options.workers, options.degree):
        print(line(finding), flush=True)


if __name__ == "__main__":
    main()
