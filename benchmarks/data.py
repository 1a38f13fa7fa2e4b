"""Seconds to tokenise a file of chats and one of plain texts: ``shardwise data prepare`` against ``datasets.map``.

    python -m benchmarks.data [--rows 100000] [--processes 2] [--kinds chats own texts]
    python -m benchmarks.data --memory

Both sides read the same JSON lines with the same tokenizer, chat template and number of processes, alternating, each in
a process of its own, and the clock starts behind the imports and the loading of the tokenizer. Both make token ids and,
for ``chats``, the mask of what the assistant says: the peer by marks that the template has for it, in batches. Their
numbers of supervised tokens must agree. For ``own`` the template is the model's own, without marks: the peer makes
token ids alone, this side the mask too, and the numbers of all tokens must agree. Beside the seconds stand those of
cores, which say more on a busy machine. Needs the package datasets.

With ``--memory``: seconds, and the most memory of its own that each process held, for ten thousand, a hundred thousand
and a million short texts. Needs no peer.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
KINDS, SIDES = ("chats", "own", "texts"), ("shardwise", "datasets")
MANY_ROWS = (10_000, 100_000, 1_000_000)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_rows(path: Path, kind: str, number: int) -> None:
    """Rows that are all different, from the chats of the examples."""
    lines = (ROOT / "examples/data/chat.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    with path.open("w", encoding="utf-8") as file:
        for index in range(number):
            turns = [dict(turn) for turn in chats[index % len(chats)]]
            turns[-1]["content"] += f" {index}"
            row = {"messages": turns} if kind != "texts" else {"text": "\n".join(turn["content"] for turn in turns)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


class Seconds(NamedTuple):
    """What something took: by the clock, and of cores, of this process and of those that it has waited for."""

    clock: float
    cores: float

    @classmethod
    def now(cls) -> Seconds:
        found = os.times()
        return cls(time.perf_counter(), sum(found[:4]))

    def since(self) -> Seconds:
        """From then to now."""
        now = self.now()
        return Seconds(now.clock - self.clock, now.cores - self.cores)


def run_shardwise(path: Path, model: Path, processes: int, folder: Path) -> tuple[Seconds, int]:
    """``(seconds, supervised tokens)`` of preparing a file; of one of the kind ``own`` all tokens."""
    from transformers import AutoTokenizer

    from shardwise.data.prepared import open_prepared, prepare
    from shardwise.data.rows import Source
    from shardwise.spec.rules import parse_run

    AutoTokenizer.from_pretrained(model)  # so that its imports are no work of either side
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    template = {} if path.stem == "own" else {"chat_template": TEMPLATE}
    run = parse_run({"model": str(model), "data": {"train": str(path)}} | template)
    began = Seconds.now()
    rows, _ = open_prepared(prepare(Source(path, run, vocab_size), folder, processes))
    seconds = began.since()
    return seconds, int((rows.lengths if path.stem == "own" else rows.supervised).sum())


def run_datasets(path: Path, model: Path, processes: int, folder: Path) -> tuple[Seconds, int]:
    """``(seconds, tokens)`` as of :func:`run_shardwise`, of reading a file and mapping a tokenizer over it."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        if path.stem == "own":
            found = tokenizer.apply_chat_template(batch["messages"], tokenize=True, return_dict=True)
            return {"input_ids": found["input_ids"]}
        if "messages" in batch:
            found = tokenizer.apply_chat_template(batch["messages"], chat_template=TEMPLATE, **settings)
            return {"input_ids": found["input_ids"], "learned": found["assistant_masks"]}
        ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(batch["text"])["input_ids"]]
        return {"input_ids": ids, "learned": [[0, *[1] * (len(row) - 1)] for row in ids]}

    began = Seconds.now()
    table = Dataset.from_json(str(path), cache_dir=str(folder))
    table = table.map(encode, batched=True, num_proc=processes, remove_columns=table.column_names)
    seconds = began.since()
    return seconds, sum(map(len, table["input_ids"])) if path.stem == "own" else sum(map(sum, table["learned"]))


def measure(side: str, path: Path, model: Path, processes: int) -> dict[str, Any]:
    """One run of a side in a process of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = _side(side, path, model, processes, folder)
        # Threads of the tokenizer beside processes would take each other's cores.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_memory(model: Path, processes: int, numbers: Sequence[int]) -> None:
    """Print what a growing number of rows costs each of the processes that prepare them."""
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "many.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": f"Row {index} of many."}) + "\n" for index in range(number))
            peaks: dict[int, int] = {}
            with subprocess.Popen(_side("shardwise", path, model, processes, folder), stdout=subprocess.PIPE) as child:
                while child.poll() is None:
                    for process in (child.pid, *_children(child.pid)):
                        peaks[process] = max(peaks.get(process, 0), _own_bytes(process))
                    time.sleep(0.02)
                assert child.stdout is not None
                found = json.loads(child.stdout.read().splitlines()[-1])
        writer, *workers = (f"{peak / 2**20:.0f}" for peak in peaks.values())
        held = f"the process that writes {writer}, those that tokenise {', '.join(workers) or 'none'}"
        print(f"{number:,} rows: {found['clock']:.1f} s; MiB of its own, at most: {held}")


def _children(process: int) -> list[int]:
    """The processes that a process has started, and these theirs; none of one that has ended."""
    own: list[int] = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            own += map(int, thread.read_text(encoding="utf-8").split())
    return [each for child in own for each in (child, *_children(child))]


def _own_bytes(process: int) -> int:
    """Anonymous memory of a process, in bytes; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _side(side: str, path: Path, model: Path, processes: int, folder: str) -> list[str]:
    """The command that runs a side in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data", "--side", side, "--file", str(path)]
    return [*command, "--model", str(model), "--processes", str(processes), "--folder", folder]


def main() -> None:
    """Print seconds, rows and tokens a second of both sides, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--model", type=Path, default=MODEL)
    for name in ("side", "file", "folder"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        run = run_shardwise if given.side == "shardwise" else run_datasets
        seconds, tokens = run(Path(given.file), given.model, given.processes, Path(given.folder))
        print(json.dumps({**seconds._asdict(), "tokens": tokens}))
        return
    if given.memory:
        measure_memory(given.model, given.processes, MANY_ROWS)
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.kinds:
            path = Path(folder) / f"{kind}.jsonl"
            write_rows(path, kind, given.rows)
            taken: dict[str, list[Seconds]] = {side: [] for side in SIDES}
            counted: dict[str, int] = {}
            for _ in range(given.repeats):
                for side in SIDES:
                    found = measure(side, path, given.model, given.processes)
                    taken[side].append(Seconds(found["clock"], found["cores"]))
                    counted[side] = found["tokens"]
            if len(set(counted.values())) > 1:
                raise SystemExit(f"{kind}: the sides disagree about the supervised tokens: {counted}")
            medians = {side: Seconds(*map(statistics.median, zip(*taken[side], strict=True))) for side in SIDES}
            for side, (clock, cores) in medians.items():
                speed = f"{given.rows / clock:,.0f} rows/s, {counted[side] / clock:,.0f} tokens counted/s"
                print(f"{kind}: {side} {clock:.1f} s, {cores:.1f} s of cores, {speed}", flush=True)
            ours, theirs = medians["shardwise"], medians["datasets"]
            ratios = f"{ours.clock / theirs.clock:.2f}, of seconds of cores {ours.cores / theirs.cores:.2f}"
            print(f"{kind}: ratio of seconds {ratios}", flush=True)


if __name__ == "__main__":
    main()
