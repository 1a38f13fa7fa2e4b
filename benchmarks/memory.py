"""Memory of a rank under TP 2 x PP 2 against one process, on an untied random Llama of about 1 GiB in fp32.

    python -m benchmarks.memory

Memory is anonymous memory (RssAnon) minus its value before the model is built, sampled every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.layouts import LEARNING_RATE, MAX_GRAD_NORM, llama, num_cores, quiet_environment

ROWS, LENGTH, STEPS = 4, 64, 3
SHARE_LIMIT = 0.30
CONFIG = llama(2048, 4096, 6, (16, 16), 8192)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. ``largest_slice`` is the largest of its parameters' local parts."""

    own: int
    largest_slice: int
    peak_loading: int
    peak: int
    loss: float

    @property
    def loading_limit(self) -> int:
        """What loading may take: the rank's own parameters and twice its largest slice."""
        return self.own + 2 * self.largest_slice


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights of an untied Llama without biases, one key/value head a head."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for block in range(config["num_hidden_layers"]):
        name = f"model.layers.{block}"
        shapes |= {f"{name}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        shapes |= {f"{name}.mlp.{p}_proj.weight": (wide, hidden) for p in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{name}.{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_model(folder: Path) -> int:
    """Write the model tensor by tensor, so that writing needs little memory.

    Returns:
        Bytes of its weights.
    """
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    shapes = tensor_shapes(CONFIG)
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for values in _weights(shapes):
            file.write(values.data)
    return end


def _weights(shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for shape in shapes.values():
        if len(shape) == 1:
            yield np.ones(shape, np.float32)
        else:
            values = generator.standard_normal(shape, np.float32)
            values *= 0.02
            yield values


def measure_rank(rank: int, folder: str, tp: int, pp: int) -> RankMemory:
    """Load and train on this rank as the product does, and watch its memory."""
    import torch

    from shardwise.checkpoint.hf import load_slices
    from shardwise.checkpoint.naming import naming_of_folder
    from shardwise.data.batch import START, Batch
    from shardwise.launch.heap import keep_freed_pages
    from shardwise.models.build import build_on_meta
    from shardwise.parallel.apply import parallelize
    from shardwise.parallel.mesh import build_mesh
    from shardwise.spec.run import TrainConfig
    from shardwise.spec.strategy import Strategy, default_stages
    from shardwise.train.memory import MemoryMeter
    from shardwise.train.optim import Optimizer
    from shardwise.train.step import train_step

    torch.set_num_threads(max(1, num_cores() // (tp * pp)))
    keep_freed_pages(os.environ)
    stages = default_stages(CONFIG["num_hidden_layers"], pp)
    mesh = build_mesh(Strategy(pp=pp, tp=tp, stages=stages, micro_batch_size=ROWS // pp), torch.device("cpu"))
    meter = MemoryMeter(torch.device("cpu"))
    hf_model = build_on_meta(Path(folder), "sdpa")
    naming = naming_of_folder(Path(folder), hf_model)
    model, _ = parallelize(hf_model, mesh)
    load_slices(Path(folder), model.shards, naming)
    peak_loading = meter.peak_bytes()
    optimizer = Optimizer(model.shards, TrainConfig())
    tokens = torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    shape = (pp, ROWS // pp, LENGTH)
    ids, targets = (part.reshape(shape) for part in (tokens[:, :-1], tokens[:, 1:]))
    positions = torch.arange(LENGTH).expand(shape)
    count = ids.numel()
    batch = Batch(
        ids,
        targets,
        positions,
        torch.full(ids.shape[:2], ids.shape[2]),
        count,
        count,
        count,
        ROWS,
        (),
        None,
        0,
        0,
        START,
    )
    for _ in range(STEPS):
        loss = train_step(model, optimizer, batch, LEARNING_RATE, MAX_GRAD_NORM, []).loss
    peak = meter.peak_bytes()
    meter.close()
    sizes = [shard.data.numel() * shard.data.element_size() for shard in model.shards]
    assert loss is not None
    return RankMemory(sum(sizes), max(sizes), peak_loading, peak, loss)


def main() -> None:
    """Run the benchmark; exit status 1 where a limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    options = parser.parse_args()
    os.environ.update({k: v for k, v in quiet_environment(num_cores()).items() if k not in os.environ})
    from shardwise.testing import run_distributed

    with tempfile.TemporaryDirectory(prefix="shardwise-memory-") as folder:
        print(
            f"model: {write_model(Path(folder)) / 2**30:.2f} GiB in fp32, {ROWS} rows of {LENGTH}, {STEPS} AdamW steps"
        )
        (whole,) = run_distributed(measure_rank, 1, folder, 1, 1, timeout=600.0)
        ranks = run_distributed(measure_rank, options.tp * options.pp, folder, options.tp, options.pp, timeout=600.0)
    good = True
    print(f"{'rank':12} {'own MiB':>8} {'loading MiB':>12} {'limit':>7} {'peak MiB':>9} {'share':>7}")
    for label, rank in [("one process", whole), *((f"rank {i}", rank) for i, rank in enumerate(ranks))]:
        share = rank.peak / whole.peak
        good &= rank.peak_loading <= rank.loading_limit and (rank is whole or share <= SHARE_LIMIT)
        loading, limit = rank.peak_loading / 2**20, rank.loading_limit / 2**20
        print(f"{label:12} {rank.own / 2**20:8.0f} {loading:12.0f} {limit:7.0f} {rank.peak / 2**20:9.0f} {share:7.1%}")
    print(f"limits {'kept' if good else 'missed'}: share at most {SHARE_LIMIT:.0%}, loading own + 2 x largest slice")
    print(f"loss after {STEPS} steps: {whole.loss:.6f} and {ranks[0].loss:.6f}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
