"""What a whole training job takes: memory of all its processes and of the largest, seconds a step.

    python -m benchmarks.job
    python -m benchmarks.job RUN.yaml key=value ...

Without a file it runs examples/llama2-7b-lora.yaml, whose numbers are in docs/en/lora.md. Results go to a temporary
folder, which is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.watch import StepRecord, watch
from shardwise.units import format_bytes, format_seconds

DEFAULT_RUN = "examples/llama2-7b-lora.yaml"
SHOWN_LINES = 20  # of the log of a job that fails


def report(record: StepRecord, job_seconds: float, metrics: str) -> str:
    """The numbers of a job that ended well, as lines of text.

    Args:
        metrics: what the job has written to ``metrics.jsonl``.
    """
    lines = [json.loads(line) for line in metrics.splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    seconds = [step["step_seconds"] for step in steps]
    tokens = statistics.median(step["num_input_tokens"] for step in steps)
    losses = [f"{step['loss']:.4f}" if step["loss"] is not None else "none" for step in (steps[0], steps[-1])]
    memory = f"{format_bytes(record.peak_total_bytes)}, the largest {format_bytes(record.peak_rank_bytes)}"
    spread = f"{len(seconds)} ({min(seconds):.2f} to {max(seconds):.2f} s), {tokens:.0f} tokens"
    return "\n".join(
        [
            f"memory    all processes together at most {memory}",
            f"step      median {statistics.median(seconds):.2f} s of {spread}",
            f"job       {format_seconds(job_seconds)} from the command to its end",
            f"loss      {losses[0]} in the first step, {losses[1]} in the last",
        ]
    )


def main() -> None:
    """Run the job and print what it took; the exit status is the job's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", nargs="?", default=DEFAULT_RUN, help="a run.yaml")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="keys that win over those of the file")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which the job is killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardwise-job-") as folder:
        output, log = Path(folder) / "out", Path(folder) / "log"
        command = [sys.executable, "-m", "shardwise.cli", "train", options.run, *options.settings]
        began = time.monotonic()
        record = watch([*command, f"output_dir={output}"], os.environ, output / "metrics.jsonl", log, options.timeout)
        job_seconds = time.monotonic() - began
        if record.exit_code:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
            print("\n".join([*tail, f"the job ended with status {record.exit_code}"]), file=sys.stderr)
            sys.exit(record.exit_code if record.exit_code > 0 else 3)
        print(report(record, job_seconds, (output / "metrics.jsonl").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
