"""Seconds to tokenise a file of chats and one of plain texts: ``shardwise data prepare`` against ``datasets.map``.

    python -m benchmarks.data [--rows 100000] [--processes 2]

Both sides read the same JSON lines with the same tokenizer and as many processes, alternating, each in a process of its
own, and the clock starts behind the imports. The peer's function makes token ids in batches, as its documentation
recommends, and nothing else; our side also finds what is supervised, checks every row and names it. Needs the package
datasets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
KINDS, SIDES = ("chats", "texts"), ("shardwise", "datasets")


def write_rows(path: Path, kind: str, number: int) -> None:
    """Rows that are all different, from the chats of the examples."""
    lines = (ROOT / "examples/data/chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    with path.open("w", encoding="utf-8") as file:
        for index in range(number):
            turns = [dict(turn) for turn in chats[index % len(chats)]]
            turns[-1]["content"] += f" {index}"
            row = {"messages": turns} if kind == "chats" else {"text": "\n".join(turn["content"] for turn in turns)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def run_shardwise(path: Path, model: Path, processes: int, folder: Path) -> tuple[float, int]:
    """``(seconds, tokens)`` of preparing a file."""
    from shardwise.data.prepared import open_prepared, prepare
    from shardwise.data.rows import Source
    from shardwise.spec.rules import parse_run

    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    run = parse_run({"model": str(model), "data": {"train": str(path)}})
    import transformers  # noqa: F401  its import is no work of either side

    began = time.perf_counter()
    rows, _ = open_prepared(prepare(Source(path, run, vocab_size), folder, processes))
    return time.perf_counter() - began, int(rows.lengths.sum())


def run_datasets(path: Path, model: Path, processes: int, folder: Path) -> tuple[float, int]:
    """``(seconds, tokens)`` of reading a file and mapping a tokenizer over it in batches."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        if "messages" in batch:
            texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        else:
            ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(batch["text"])["input_ids"]]
        return {"input_ids": ids, "length": [len(row) for row in ids]}

    began = time.perf_counter()
    table = Dataset.from_json(str(path), cache_dir=str(folder))
    table = table.map(encode, batched=True, num_proc=processes, remove_columns=table.column_names)
    seconds = time.perf_counter() - began
    return seconds, sum(table["length"])


def measure(side: str, path: Path, model: Path, processes: int) -> dict[str, Any]:
    """One run of a side in a process of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.data", "--side", side, "--file", str(path)]
        command += ["--model", str(model), "--processes", str(processes), "--folder", folder]
        # Threads of the tokenizer beside processes would take each other's cores.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print seconds, rows and tokens a second of both sides, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, default=MODEL)
    for name in ("side", "file", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side = run_shardwise if given.side == "shardwise" else run_datasets
        seconds, tokens = side(Path(given.file), given.model, given.processes, Path(given.folder))
        print(json.dumps({"seconds": seconds, "tokens": tokens}))
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            path = Path(folder) / f"{kind}.jsonl"
            write_rows(path, kind, given.rows)
            taken: dict[str, list[float]] = {side: [] for side in SIDES}
            tokens: dict[str, int] = {}
            for _ in range(given.repeats):
                for side in SIDES:
                    found = measure(side, path, given.model, given.processes)
                    taken[side].append(found["seconds"])
                    tokens[side] = found["tokens"]
            medians = {side: statistics.median(times) for side, times in taken.items()}
            for side in SIDES:
                speed = f"{given.rows / medians[side]:,.0f} rows/s, {tokens[side] / medians[side]:,.0f} tokens/s"
                print(f"{kind}: {side} {medians[side]:.1f} s, {speed}")
            print(f"{kind}: ratio of seconds {medians['shardwise'] / medians['datasets']:.2f}")


if __name__ == "__main__":
    main()
