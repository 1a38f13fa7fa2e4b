"""Seconds that the loader takes of a step, beside the seconds of the step: SmolLM2 and a tiny model, on this machine.

    python -m benchmarks.loader [--steps 20] [--batch 8]

The step is one process's forward, backward and AdamW update of the model on the very batches, by plain torch: no
parallel plan makes it cheaper for the same rows. The loader's time is that of the next batch: order, layout, tensors.
Rows are as long as those of chats. SmolLM2 is built with random weights, which cost the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.data import MODEL
from shardwise.data.batch import Batch
from shardwise.data.loader import Loader, LoaderSettings
from shardwise.data.store import Rows, Store

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
NUM_ROWS = 10_000


def make_store(vocab_size: int, longest: int) -> Rows:
    """Rows of one flat store, as prepared data are; lengths as chats have them."""
    generator = np.random.default_rng(0)
    lengths = np.minimum(longest, np.exp(generator.normal(4.5, 0.7, NUM_ROWS)).astype(np.int64) + 8)
    ids = generator.integers(0, vocab_size, int(lengths.sum())).astype("<i4")
    by_row = {"lengths": lengths.astype("<i4"), "supervised": (lengths - 1).astype("<i4")}
    by_row |= {"lines": np.arange(NUM_ROWS), "files": np.zeros(NUM_ROWS, "<i4"), "prints": np.zeros(NUM_ROWS, ">u8")}
    columns = {"input_ids": ids, "labels": ids, "position_ids": np.empty(0, "<i4")} | by_row
    return Rows([Store(columns, ["made"])])


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, backward and update on all micro-batches of a step."""
    parts = zip(batch.input_ids, batch.targets, batch.position_ids, strict=True)
    for ids, targets, positions in parts:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / batch.num_tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(model: LlamaForCausalLM, batch: int, steps: int, packing: bool) -> tuple[float, float]:
    """Medians of ``(seconds of the loader, seconds of the step)``."""
    rows = make_store(model.config.vocab_size, min(512, model.config.max_position_embeddings))
    settings = LoaderSettings(batch, min(batch, 8), packing=packing, pack_length=512 if packing else None)
    batches = Loader(rows, settings).batches()
    optimizer = torch.optim.AdamW(model.parameters())
    next(batches)  # the order of the epoch is drawn with the first
    times: list[tuple[float, float]] = []
    for _ in range(steps):
        began = time.perf_counter()
        found = next(batches)
        loaded = time.perf_counter()
        train_step(model, optimizer, found)
        times.append((loaded - began, time.perf_counter() - loaded))
    loader, step = (statistics.median(column) for column in zip(*times, strict=True))
    return loader, step


def main() -> None:
    """Print for each model, unpacked and packed, both seconds and the loader's share of their sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--model", type=Path, default=MODEL)
    given = parser.parse_args()
    config: dict[str, Any] = json.loads((given.model / "config.json").read_text(encoding="utf-8"))
    for name, values in (("tiny", TINY), (given.model.name, config)):
        model = LlamaForCausalLM(LlamaConfig(**values)).float().train()
        for packing in (False, True):
            loader, step = measure(model, given.batch, given.steps, packing)
            kind = "packed" if packing else "unpacked"
            share = loader / (loader + step)
            print(f"{name}, {kind}: loader {1e3 * loader:.2f} ms, step {1e3 * step:.1f} ms, share {share:.2%}")


if __name__ == "__main__":
    main()
