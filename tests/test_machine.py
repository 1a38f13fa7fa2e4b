"""What a machine says of its memory: the kernel, and control groups of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.machine import cpu_name, free_memory_bytes

MIB = 2**20


def tell(root: Path, values: dict[str, str]) -> Path:
    for name, text in values.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {900 * 1024} kB\nMemAvailable:   {600 * 1024} kB"}
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (MEMINFO, 600),
        ({}, None),
        ({**MEMINFO, f"{V2}/memory.max": "max", f"{V2}/memory.current": "5"}, 600),
        (
            {
                **MEMINFO,
                f"{V2}/memory.max": str(500 * MIB),
                f"{V2}/memory.current": str(300 * MIB),
                f"{V2}/memory.stat": f"anon 7\ninactive_file {40 * MIB}",
            },
            240,
        ),
        (
            {
                **MEMINFO,
                "proc/self/cgroup": "4:cpu:/x\n3:memory:/a/b",
                f"{V1}/a/memory.limit_in_bytes": str(400 * MIB),
                f"{V1}/a/memory.usage_in_bytes": str(300 * MIB),
                f"{V1}/a/b/memory.limit_in_bytes": str(2**63 - 4096),
                f"{V1}/a/b/memory.usage_in_bytes": "1",
            },
            100,
        ),
        ({f"{V2}/memory.max": "100", f"{V2}/memory.current": "200"}, 0),
    ],
)
def test_the_narrowest_limit_counts(tmp_path: Path, values: dict[str, str], want: int | None) -> None:
    assert free_memory_bytes(tell(tmp_path, values)) == (None if want is None else want * MIB)


def test_this_machine_has_a_name_and_memory() -> None:
    assert "core" in cpu_name()
    assert (free_memory_bytes() or 1) > 0
