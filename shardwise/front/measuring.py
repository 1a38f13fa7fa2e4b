"""The profile of this machine: measured by its own processes, kept in the user's cache, read again. Loads no torch.

A file is named by what its numbers depend on: processor, cores, number of processes and threads, versions, and the
code that measures. What is measured in full takes the place of what was measured quickly.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from shardwise.errors import ConfigError, LaunchError, ShardwiseError
from shardwise.launch.agent import launch, threads_of
from shardwise.lifeline import die_with_parent
from shardwise.log import say
from shardwise.machine import available_cores, cpu_name, free_memory_bytes
from shardwise.measure.names import ANSWER, REQUEST, TARGET
from shardwise.measure.profile import profile_of
from shardwise.measure.samples import Samples
from shardwise.spec.cache import cache_folder, code_hash, hash_of_all, write_whole
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.plan import DeviceType

AUTO = "auto"  # the name of the profile that is measured here
LEVELS = ("full", "quick")  # the better first
_MOST_PROCESSES = 256
_SECONDS = 600  # after which a measurement counts as stuck
_STOP_SECONDS = 15  # in which one that is stopped cleans up
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_UNKNOWN_MEMORY = float(8 * 2**30)  # where the system does not tell how much it has
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def measure(processes: int, level: str, device_type: DeviceType = "cpu") -> Samples:
    """Measure with ``processes`` processes at once. To be called on the main thread, before torch is imported.

    Raises:
        LaunchError: a process failed; its log is named on the terminal.
        SystemExit: a signal stopped it, which was told; its code is the contract's.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardwise-measure-"))
    except OSError as error:
        raise LaunchError("shardwise measure", f"has no folder to work in ({error})", "Set TMPDIR") from None
    code = -1
    try:
        memory = memory_share(processes)
        request = {"level": level, "device_type": device_type, "cores": available_cores(), "memory_bytes": memory}
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        (folder / "plan.json").write_text(json.dumps({"device_type": device_type}), encoding="utf-8")
        code = launch(folder, processes, target=TARGET)
        if code in _STOPPED:
            raise SystemExit(code)
        if code:
            rule = f"the processes that measure ended with status {code}"
            raise LaunchError("shardwise measure", rule, "Measure again, with fewer processes")
        return Samples.from_json(json.loads((folder / ANSWER).read_text(encoding="utf-8")))
    finally:
        if code != LaunchError.exit_code:  # a failed job's message names its log
            shutil.rmtree(folder, ignore_errors=True)


def memory_share(processes: int) -> float:
    """Bytes of the machine's free memory for each of ``processes`` that share it."""
    free = free_memory_bytes()
    return max(1.0, _UNKNOWN_MEMORY if free is None else free) / processes


def keep(samples: Samples, environ: Mapping[str, str]) -> Path | None:
    """Keep a measurement in the user's cache; its file, or None where nothing can be kept."""
    path = _path(samples.processes, samples.level, samples.device_type, environ)
    if path is None:
        return None
    write_whole(path, json.dumps(samples.to_json(), indent=1))
    return path if path.exists() else None


def known(processes: int, environ: Mapping[str, str], device_type: str = "cpu") -> Samples | None:
    """The best measurement with so many processes that the cache holds; one that cannot be read counts as none."""
    for level in LEVELS:
        path = _path(processes, level, device_type, environ)
        try:
            if path is not None:
                return Samples.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
    return None


def measured_cluster(processes: int, environ: Mapping[str, str]) -> ClusterSpec:
    """The profile of this machine's CPU for so many processes; measured quickly, once, where none is known.

    The measurement runs in a child, so that it can be asked for anywhere.

    Raises:
        LaunchError: the child failed.
        KeyboardInterrupt: the user's, once the child has cleaned up.
    """
    samples = known(processes, environ)
    if samples is None:
        say(f"measuring this machine with {processes} processes, once (a few seconds)")
        samples = _measured_in_child(processes, environ)
        if keep(samples, environ) is not None:
            say(f"kept; `shardwise measure --devices {processes}` measures in full, or anew")
    return cluster_of(samples)


def measured_here(processes: int | None, level: str, environ: Mapping[str, str], *, show: bool) -> Samples:
    """Measure this machine's CPU and keep what was found; with ``show`` what is kept, without running anything.

    Raises:
        ConfigError: there is nothing to show, or there are too many processes.
        LaunchError: as :func:`measure`.
    """
    number = processes or min(available_cores(), _MOST_PROCESSES)
    if number > _MOST_PROCESSES:
        rule = f"{_MOST_PROCESSES} processes at once are the most"
        raise ConfigError(f"--devices {number}", rule, f"Use --devices {_MOST_PROCESSES}")
    if show:
        samples = known(number, environ)
        if samples is None:
            rule = f"nothing was measured with {number} process{'' if number == 1 else 'es'}"
            raise ConfigError("--show", rule, f"Run `shardwise measure --devices {number}` first")
        return samples
    say(f"measuring with {number} processes at once, {'about half a minute' if level == 'full' else 'a few seconds'}")
    samples = measure(number, level)
    path = keep(samples, environ)
    say(f"kept as {path}" if path else "not kept: there is no cache folder that can be written to")
    return samples


def cluster_of(samples: Samples) -> ClusterSpec:
    """The profile of a measurement."""
    return ClusterSpec.from_json(profile_of(samples, profile_name(samples)))


def profile_name(samples: Samples) -> str:
    """What the profile of a measurement is called."""
    return f"{samples.device_type}-{samples.processes}-measured"


def _measured_in_child(processes: int, environ: Mapping[str, str]) -> Samples:
    own = {name: value for name, value in environ.items() if name not in _PLACE and not name.startswith("TORCHELASTIC")}
    command = [sys.executable, "-m", "shardwise.front.measuring", str(processes), "quick"]
    try:
        done = _run_child(command, own)
        answer = json.loads(done.stdout)
        if "refused" not in answer:
            return Samples.from_json(answer)
        rule = answer["refused"]
    except subprocess.TimeoutExpired:
        rule = f"did not end within {_SECONDS} s"
    except (ValueError, KeyError, TypeError):
        rule = f"ended with status {done.returncode}"
    else:
        # What the launcher said of it: the rank, its error and its log.
        rule += f" ({' '.join(done.stderr.decode(errors='replace').split())[-300:]})"
    raise LaunchError(" ".join(command[1:]), rule, "Give a strategy, or run `shardwise measure` to see why")


def _run_child(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Run a child that cleans up after itself when it is stopped.

    It has a session of its own, so that Ctrl-C reaches it once, by us, and is waited for: killed in the middle it
    would leave its folders.

    Raises:
        TimeoutExpired: it takes too long; it is gone then.
    """
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            answer, told = child.communicate(timeout=_SECONDS)
        except BaseException:
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=_STOP_SECONDS)
            child.kill()
            raise
    return subprocess.CompletedProcess(command, child.returncode, answer, told)


def _path(processes: int, level: str, device_type: str, environ: Mapping[str, str]) -> Path | None:
    folder = cache_folder(environ, "machine")
    if folder is None:
        return None
    parts = [cpu_name(), processes, threads_of(processes, environ), device_type]
    parts += [version("torch"), code_hash(("measure",))]
    return folder / f"{device_type}-{processes}-{level}-{hash_of_all(parts)[:16]}.json"


def _main(processes: int, level: str) -> int:
    """The child: its answer, or what it could not do, as JSON. It stops when its parent dies, too."""
    die_with_parent(os.getppid(), by=signal.SIGTERM)  # which the launcher takes as a stop
    try:
        answer, code = measure(processes, level).to_json(), 0
    except ShardwiseError as error:
        answer, code = {"refused": error.rule}, error.exit_code
    print(json.dumps(answer), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2]))
