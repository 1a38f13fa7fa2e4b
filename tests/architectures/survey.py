"""What works on every causal language model of the installed transformers: ``python -m tests.architectures.survey``.

Each architecture is shrunk, built, run forward and backward, and cut into two stages whose logits and gradients
are compared with the whole model's. Each in a process of its own with a time limit, so that none ends the list.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIME_LIMIT = 300.0


@dataclass
class Finding:
    """What one architecture showed; a reason stands where a step failed."""

    name: str
    class_name: str = ""
    builds: str = "not reached"
    build_seconds: float = 0.0
    forward: str = "not reached"
    forward_seconds: float = 0.0
    causal: bool = False
    num_parameters: int = 0
    structure: str = "not reached"
    num_blocks: int = 0
    kinds: list[int] = field(default_factory=list)
    stored_buffers: list[str] = field(default_factory=list)
    pipeline: str = "not reached"
    pipeline_error: float | None = None

    @property
    def runs(self) -> bool:
        return self.builds == "ok" and self.forward.startswith("ok")


def architectures() -> list[str]:
    """Model types of all causal language models of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# What a configuration must say before transformers can build or run its model: its defaults alone do not do.
COMPLETED: dict[str, dict[str, Any]] = {
    # As an encoder; block-sparse attention looks ahead.
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 8, "rope_theta": 500000.0, "clip_qkv": 8.0}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
}


def default_config(name: str) -> Any:
    """The configuration that a model type has where nothing is said; a decoder where there is a choice."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[name](**COMPLETED.get(name, {}))
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        config.is_decoder = True
    return config


def examine(name: str) -> Finding:
    """All steps on one architecture, in this process."""
    import torch

    from tests.architectures import steps

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    finding = Finding(name)
    steps.examine_into(finding, default_config(name))
    return finding


def _work(name: str, sender: Connection) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    try:
        sender.send(asdict(examine(name)))
    except Exception as error:
        sender.send(asdict(Finding(name, builds=f"the survey itself failed ({type(error).__name__}: {error})")))
    sender.close()


def survey(names: Sequence[str], workers: int, limit: float = TIME_LIMIT) -> Iterator[Finding]:
    """The findings of ``names`` as they come, each from a forked process."""
    import transformers

    from tests.architectures import steps  # noqa: F401

    transformers.logging.set_verbosity_error()
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once; nothing has run yet
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(name, sender))
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        for receiver in wait(list(running), timeout=1.0):
            name, process, _ = running.pop(receiver)
            yield _received(name, receiver, process)
        for receiver, (name, process, start) in list(running.items()):
            if time.monotonic() - start > limit:
                del running[receiver]
                process.kill()
                process.join()
                yield Finding(name, builds=f"took more than {limit:.0f} s")


def _received(name: str, receiver: Connection, process: Any) -> Finding:
    try:
        return Finding(**receiver.recv())
    except EOFError:
        process.join()
        return Finding(name, builds=f"its process ended with {process.exitcode}")
    finally:
        process.join(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a model type (may be given several times)")
    parser.add_argument("--json", type=Path, help="file to write the findings to")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    findings = []
    for finding in survey(arguments.only or architectures(), arguments.workers):
        findings.append(finding)
        print(line(finding), flush=True)
    print(summary(findings))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(f) for f in sorted(findings, key=lambda f: f.name)], indent=1))


def line(f: Finding) -> str:
    """One architecture in one line."""
    kinds = "".join(map(str, f.kinds))
    return (
        f"{f.name:28} build {f.builds[:150]} ({f.build_seconds:.1f} s)"
        f" | forward {f.forward[:200]} ({f.forward_seconds:.1f} s)"
        f" | causal {f.causal} | structure {f.structure[:120]} {kinds} | pipeline {f.pipeline[:250]}"
        + (f" | stored {f.stored_buffers}" if f.stored_buffers else "")
    )


def summary(findings: Sequence[Finding]) -> str:
    """The counts that the issue sets bars for."""
    runs = [f for f in findings if f.runs]
    causal = [f for f in runs if f.causal]
    exact = [f for f in causal if f.pipeline == "exact"]
    refused = [f for f in causal if f.pipeline.startswith("refused")]
    return (
        f"{len(findings)} architectures: {len(runs)} build and run, {len(causal)} of them causal; "
        f"pipeline cut exact on {len(exact)}, refused on {len(refused)}, else {len(causal) - len(exact) - len(refused)}"
    )


if __name__ == "__main__":
    main()
