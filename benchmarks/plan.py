"""How long a plan takes as the number of devices grows: wall and CPU seconds, memory, one fresh process each."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
# Model, profile, rows of 4,096 tokens a step, numbers of devices, and the most seconds that the last may take.
CASES = (
    ("llama2-70b", "ascend-910b2", 1024, (64, 128, 256, 512), 1.0),
    ("deepseek-v3", "h800-80gb", 8192, (1024, 2048, 4096, 8192, 16384), 5.0),
)
MOST_MIB = 500
_PROGRAM = """
import json, sys, time
from pathlib import Path
model, cluster, rows, devices = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
from shardwise.front.planning import make_job
from shardwise.planner.search import search
begin, cpu = time.perf_counter(), time.process_time()
tree = {"model": model, "cluster": cluster, "devices": devices}
tree |= {"train": {"global_batch_size": rows}, "data": {"max_length": 4096}}
found = search(make_job(tree, {}))
# Not getrusage: its peak counts what the process that started this one held.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({
    "seconds": time.perf_counter() - begin,
    "cpu_seconds": time.process_time() - cpu,
    "mib": int(peak.split()[1]) / 1024,
    "considered": found.considered,
    "step_seconds": found.plans[0].step_seconds,
    "plan": str(found.plans[0].candidate),
}))
"""


def measure(model: str, cluster: str, rows: int, devices: int) -> dict[str, object]:
    """One search in a process of its own."""
    command = [sys.executable, "-c", _PROGRAM, model, cluster, str(rows), str(devices)]
    answer = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=600)
    result: dict[str, object] = json.loads(answer.stdout)
    return result


def main() -> None:
    """Print a line a number of devices, and whether the limits hold."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    good = True
    for model, cluster, rows, numbers, limit in CASES:
        print(f"{model} on {cluster}, {rows} rows a step")
        print(f"{'devices':>9} {'wall s':>8} {'CPU s':>8} {'MiB':>6} {'splits':>9} {'step s':>8}  plan")
        for devices in numbers:
            one = measure(model, cluster, rows, devices)
            wall, cpu, mib = (float(str(one[name])) for name in ("seconds", "cpu_seconds", "mib"))
            step = float(str(one["step_seconds"]))
            print(f"{devices:9} {wall:8.2f} {cpu:8.2f} {mib:6.0f} {one['considered']:9} {step:8.2f}  {one['plan']}")
            good &= mib <= MOST_MIB
        met = cpu <= limit
        print(f"{cpu:.2f} CPU seconds for {numbers[-1]} devices, at most {limit:g}: {'met' if met else 'MISSED'}\n")
        good &= met
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
