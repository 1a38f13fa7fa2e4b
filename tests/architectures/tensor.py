"""The tensor table of every architecture, beside the one that Hugging Face publishes: what both leave whole and move.

python -m tests.architectures.tensor --degree 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.architectures.survey import architectures, default_config


@dataclass
class TensorFinding:
    """What the search found for one architecture, and what its published plan does on the same ranks."""

    name: str
    result: str = "not reached"
    seconds: float = 0.0
    published: bool = False
    published_result: str = ""
    styles: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    whole: float = 1.0
    moved: float = 0.0
    published_whole: float = 1.0
    published_moved: float = 0.0
    published_styles: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    trace: str = ""


def examine(name: str, degree: int) -> TensorFinding:
    import torch
    from transformers import AutoModelForCausalLM

    from shardwise.models.shrink import build_small, shrink
    from shardwise.models.structure import find_structure
    from shardwise.tensor.find import find_tables
    from shardwise.tensor.simulate import compare, reference

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    finding = TensorFinding(name)
    try:
        config = default_config(name)
        small_config = shrink(config, degree=degree)
        small = build_small(small_config)
        with torch.device("meta"):
            real = AutoModelForCausalLM.from_config(config)
        start = time.monotonic()
        table, own = find_tables(real, small, degree)
        finding.seconds = time.monotonic() - start
        finding.result = "ok"
        structure = find_structure(small)
        finding.styles = {k: v.style.value for k, v in own.modules.items()}
        finding.values = {k: [x.attribute for x in v] for k, v in own.values.items()}
        finding.refused = dict(table.refused)
        want = reference(small)
        finding.moved = sum(compare(small, own, want).moved.values())
        finding.whole = whole_share(small, structure, own)
        _compare_with_published(finding, small, structure, own, want)
    except Exception as error:
        finding.result = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        finding.trace = traceback.format_exc()[-1500:]
    return finding


def _compare_with_published(finding: TensorFinding, small: Any, structure: Any, own: Any, want: Any) -> None:
    """Run the published plan on the same ranks, and count the same things."""
    from shardwise.spec.tolerance import PROOF
    from shardwise.tensor.simulate import compare
    from tests.architectures.published import published_table

    theirs, unknown = published_table(small, structure, own)
    finding.published = theirs is not None
    if theirs is None:
        return
    finding.published_styles = {k: v.style.value for k, v in theirs.modules.items()}
    finding.published_whole = whole_share(small, structure, theirs)
    try:
        difference = compare(small, theirs, want)
    except Exception as error:
        finding.published_result = " ".join(f"does not run: {type(error).__name__}: {error}".split())[:200]
        return
    finding.published_moved = sum(difference.moved.values())
    finding.published_result = (
        "right" if difference.error <= PROOF else f"differs by {difference.error:.1e} at {difference.where}"
    )
    if unknown:
        finding.published_result += f", without {sorted(unknown)}"


def whole_share(model: Any, structure: Any, table: Any) -> float:
    """The share of the blocks' parameters that every rank holds whole."""
    sizes = {
        name: p.numel() for name, p in model.get_submodule(structure.blocks).named_parameters(prefix=structure.blocks)
    }
    return sum(size for name, size in sizes.items() if not table.is_cut(name)) / sum(sizes.values())


def _work(name: str, degree: int, sender: Any) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    sender.send(asdict(examine(name, degree)))
    sender.close()


def main() -> None:
    import torch  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    waiting, running, findings = list(options.only or architectures()), {}, []
    from multiprocessing.connection import wait

    while waiting or running:
        while waiting and len(running) < options.workers:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, options.degree, sender))
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        for receiver in wait(list(running), timeout=1.0):
            name, process, _ = running.pop(receiver)
            try:
                findings.append(TensorFinding(**receiver.recv()))
            except EOFError:
                findings.append(TensorFinding(name, result="its process died"))
            process.join(timeout=10)
            show(findings[-1])
        for receiver, (name, process, start) in list(running.items()):
            if time.monotonic() - start > options.limit:
                del running[receiver]
                process.kill()
                process.join()
                findings.append(TensorFinding(name, result=f"took more than {options.limit:.0f} s"))
                show(findings[-1])
    if options.json:
        options.json.write_text(json.dumps([asdict(f) for f in findings], indent=1))


def verdict(f: TensorFinding) -> str:
    """Ours beside the published plan."""
    if not f.published:
        return "none published"
    if f.styles == f.published_styles:
        return "same"
    if not f.published_result.startswith("right"):
        return "published is not right here"
    better = f.whole <= f.published_whole + 1e-9 and f.moved <= f.published_moved + 1e-9
    return "no more of both" if better else "MORE"


def show(f: TensorFinding) -> None:
    styles = sorted(set(f.styles.values()) - {"vocab_embedding", "vocab_head"})
    print(
        f"{f.name:26} {f.result[:230]} {f.seconds:.1f} s whole {f.whole:.3f} moved {f.moved:.0f} {styles}"
        f" | {verdict(f)}"
        + (f": {f.published_result}, {f.published_whole:.3f} {f.published_moved:.0f}" if f.published else ""),
        flush=True,
    )


if __name__ == "__main__":
    main()
