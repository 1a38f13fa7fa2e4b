"""Which rank brought the job down, from exit codes and error files. Pure but for :func:`read_errors`.

The rank that an agent sees first is as a rule one that complains about a peer's closed connection.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import LaunchError, ShardwiseError
from shardwise.files import replace_text
from shardwise.launch.whereabouts import Stack, suspects

_CONNECTION_WORDS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "failed to connect",
    "broken pipe",
    "timed out",
    "timeout",
    "socket",
    "remote process exited",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "hccl",
)
_COMMUNICATION_TYPES = ("DistError", "DistNetworkError", "DistStoreError", "DistBackendError")
_TIMEOUT_WORDS = ("timed out", "timeout")
# Errors that another attempt gives again: the same rows and weights do, and a disk that takes no checkpoint.
_REPEATING = ("NonFiniteLossError", "SaveError")
_MAX_MESSAGE, _MAX_SHOWN = 2000, 120


@dataclass(frozen=True)
class WorkerError:
    """The exception that ended a worker, as it is kept in ``logs/error-rank-N.json``.

    Attributes:
        time: when it was raised, in seconds since 1970.
        exit_code: the status with which it asks the job to end.
        connection_error: it says that a peer is gone, and so is a consequence.
        refused: the exception is one of Shardwise's own, shown without its type.
    """

    time: float
    rank: int
    type: str
    message: str
    traceback: str
    exit_code: int
    connection_error: bool
    refused: bool = False
    rule: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Culprit:
    """The rank that is to blame, what happened to it, and the exit status that follows.

    Attributes:
        rank: None if no rank is known to have failed.
        refused: the job was refused in good order: the message stands for itself.
        may_pass: another attempt may go well: neither a refusal nor what another attempt gives again.
    """

    rank: int | None
    message: str
    exit_code: int
    refused: bool = False
    may_pass: bool = True


def error_path(output_dir: Path, rank: int) -> Path:
    """Where a rank leaves its error."""
    return output_dir / "logs" / f"error-rank-{rank}.json"


def write_error(output_dir: Path, error: WorkerError) -> None:
    """Leave an error for the launcher."""
    text = json.dumps(asdict(error), ensure_ascii=False, indent=1)
    error_path(output_dir, error.rank).write_text(text, encoding="utf-8")


def read_errors(output_dir: Path, num_ranks: int) -> list[WorkerError]:
    """The errors that ranks have left. A file that its writer's death or a full disk cut short counts as none."""
    errors = []
    for path in (error_path(output_dir, rank) for rank in range(num_ranks)):
        try:
            errors.append(WorkerError(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return errors


def write_deaths(output_dir: Path, machine: int, deaths: Mapping[int, int]) -> None:
    """Leave the deaths that the launcher of one of several machines saw for those of the others, in one move."""
    path = output_dir / "logs" / f"deaths-machine-{machine}.json"
    replace_text(path, json.dumps(list(deaths.items())))


def read_deaths(output_dir: Path) -> list[dict[int, int]]:
    """The deaths that machines have left so far: exit code by rank, of each machine that has said anything."""
    paths = sorted(output_dir.glob("logs/deaths-machine-*.json"))
    return [dict(json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def remove_errors(output_dir: Path, rank: int, num_ranks: int) -> None:
    """Remove what an earlier run left: a rank its own error, rank 0 also those of ranks that there are no more."""
    if rank == 0:
        for path in output_dir.glob("logs/deaths-machine-*.json"):
            path.unlink(missing_ok=True)
    error_path(output_dir, rank).unlink(missing_ok=True)
    kept = {error_path(output_dir, other).name for other in range(num_ranks)}
    if rank == 0:
        for path in output_dir.glob("logs/error-rank-*.json"):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def is_connection_error(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, only says that a peer does not answer."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ConnectionError) or type(link).__name__ in _COMMUNICATION_TYPES:
            return True
        if type(link) is RuntimeError and any(word in str(link).lower() for word in _CONNECTION_WORDS):
            return True
        link = link.__cause__ or link.__context__
    return False


def find_culprit(
    deaths: Mapping[int, int],
    errors: list[WorkerError],
    num_ranks: int,
    standing: Mapping[int, Stack] | None = None,
) -> Culprit:
    """Name the rank that failed first.

    In this order: a rank killed by a signal; the earliest error that is no connection error; a rank that aborted
    (SIGABRT is how libraries answer the loss of a peer, too); one that left without a word; the earliest
    connection error, with the ranks that have not complained.

    Args:
        deaths: exit code of each rank that ended before the launcher sent it a signal, in the order seen;
            negative for a signal.
        errors: what the ranks have left behind, in any order.
        num_ranks: number of ranks in the job.
        standing: where ranks stood that had not ended when the others had.
    """
    by_time = sorted(errors, key=lambda error: error.time)
    told = {error.rank for error in errors}
    signalled = [rank for rank, code in deaths.items() if code < 0]
    for rank in signalled:
        if deaths[rank] != -signal.SIGABRT:
            return _killed(rank, -deaths[rank])
    for error in by_time:
        if not error.connection_error:
            return _told(error)
    if signalled:
        return _killed(signalled[0], -deaths[signalled[0]])
    for rank, code in deaths.items():
        if rank not in told:
            return Culprit(rank, f"rank {rank} left with status {code} before its work was done", LaunchError.exit_code)
    hanging = suspects(standing or {})
    if by_time and hanging and any(word in by_time[0].message.lower() for word in _TIMEOUT_WORDS):
        return _hangs(hanging, standing or {}, by_time)
    if by_time:
        silent = [rank for rank in range(num_ranks) if rank not in told]
        names = ", ".join(map(str, silent))
        hint = f" (no word from rank {names}, which may be the one that stalled)" if silent else ""
        return _told(by_time[0], hint)
    return Culprit(None, "the job failed, and no rank has said why", LaunchError.exit_code)


def _hangs(ranks: Sequence[int], standing: Mapping[int, Stack], waited: list[WorkerError]) -> Culprit:
    others = ", ".join(str(error.rank) for error in sorted(waited, key=lambda error: error.rank))
    more = f" (so do rank {', '.join(map(str, ranks[1:]))})" if ranks[1:] else ""
    first = waited[0].message.strip().splitlines()[0][:_MAX_SHOWN]
    message = f"rank {ranks[0]} hangs{more} {standing[ranks[0]]}; rank {others} waited for it until the limit ({first})"
    return Culprit(ranks[0], message, LaunchError.exit_code)


def _killed(rank: int, number: int) -> Culprit:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return Culprit(rank, f"rank {rank} was killed by {name}{hint}", LaunchError.exit_code)


def _told(error: WorkerError, hint: str = "") -> Culprit:
    if error.type == "SystemExit":
        message = f"rank {error.rank} left with status {error.exit_code}"
        told = message if error.message.isdigit() else f"{message}: {error.message}"
        return Culprit(error.rank, told, error.exit_code, may_pass=False)
    if error.refused:
        refused = error.exit_code == ShardwiseError.exit_code
        may_pass = not refused and error.type not in _REPEATING
        return Culprit(error.rank, error.message, error.exit_code, refused, may_pass)
    text = error.message.strip()
    text = text[:_MAX_MESSAGE] + " ..." if len(text) > _MAX_MESSAGE else text
    kind = f"{error.type}: {text}" if text else error.type
    told = f"rank {error.rank} failed: {kind}{hint}"
    return Culprit(error.rank, told, error.exit_code, may_pass=error.type not in _REPEATING)
