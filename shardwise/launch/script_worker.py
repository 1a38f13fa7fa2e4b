"""A worker that runs the user's script: its entry, and what the Trainer in the script needs of it. Imports torch."""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.launch.culprit import remove_errors
from shardwise.launch.join import JobStore
from shardwise.launch.place import Place, current_place
from shardwise.launch.script import Script, begun_of, note_begun, output_of, point_to
from shardwise.launch.stop import StopChannel
from shardwise.launch.streams import log_path, show, switch_log
from shardwise.launch.worker import guarded, open_process_group, timeout_seconds, use_cores
from shardwise.train.context import Restart, WorkerContext, note_nothing


class Stopped(SystemExit):
    """Raised in a script when the user has stopped the job: the rest of the script does not run.

    ``code`` is 0, so that under another launcher the process ends well; ours knows the signal from ``signal_name``.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(0)
        self.signal_name = signal_name


class ScriptWorker:
    """This process as a member of a job that runs a script.

    Attributes:
        place: its place in the job.
        folder: where its log and its errors lie now; None under another launcher than ours.
        restart: None at the first start.
    """

    def __init__(
        self,
        place: Place,
        folder: Path | None,
        terminal: TextIO | None,
        note: Callable[[str], None] = note_nothing,
        restart: Restart | None = None,
    ) -> None:
        self.place, self.folder, self._note, self.restart = place, folder, note, restart
        self._job_dir, self._terminal = folder, terminal
        if restart is not None and folder is not None:
            self.folder = begun_in(folder)
        self._store: JobStore | None = None

    @property
    def store(self) -> JobStore:
        """The job's store, connected at the first use."""
        if self._store is None:
            self._store = JobStore(self.place, timedelta(seconds=timeout_seconds(os.environ)))
        return self._store

    def show_output(self) -> None:
        """Show rank 0's output from now on: what came before first contact the first process has shown already."""
        show()

    def has_worked_in(self, output_dir: Path) -> bool:
        """Whether the Trainer that begins in a folder is one of an attempt before, and what lies there is its own.

        A second Trainer in a folder is another run. Where an attempt had two, whose results lie there is not known.
        """
        earlier, now = self._begun()
        attempts = [attempt for attempt, folder in earlier if folder == output_dir.resolve()]
        return bool(attempts) and len(set(attempts)) == len(attempts) and output_dir.resolve() not in now

    def has_left(self, output_dir: Path) -> bool:
        """Whether the first Trainer of this attempt begins in a folder that no attempt before has had."""
        earlier, now = self._begun()
        return bool(earlier) and not now and output_dir.resolve() not in {folder for _, folder in earlier}

    def begin(self, output_dir: Path) -> None:
        """Leave word that a Trainer of this attempt begins in a folder; called on rank 0."""
        if self._job_dir is not None:
            note_begun(self._job_dir, output_dir.resolve(), self.restart.number if self.restart else 0)

    def _begun(self) -> tuple[list[tuple[int, Path]], list[Path]]:
        """What attempts before have begun, and the folders in which this one has."""
        begun = begun_of(self._job_dir) if self._job_dir is not None else []
        number = self.restart.number if self.restart else 0
        return [each for each in begun if each[0] < number], [folder for each, folder in begun if each == number]

    def settle(self, output_dir: Path, again: bool = False) -> WorkerContext:
        """Move into the output folder, which is there: log, errors and status lie in it from now on.

        ``again``: an attempt before has worked in it, as rank 0 has found.
        """
        output_dir = output_dir.resolve()
        if self.folder is not None and self._job_dir is not None:
            (output_dir / "logs").mkdir(exist_ok=True)
            remove_errors(output_dir, self.place.rank, self.place.world_size)
            new = log_path(output_dir, self.place.rank)
            if self.folder == self._job_dir:
                with log_path(self.folder, self.place.rank).open("rb") as before, new.open("ab") as after:
                    shutil.copyfileobj(before, after)
            switch_log(new)
            self.folder = output_dir
            if self.place.local_rank == 0:
                point_to(self._job_dir, output_dir)
        return WorkerContext(
            output_dir=output_dir,
            rank=self.place.rank,
            local_rank=self.place.local_rank,
            world_size=self.place.world_size,
            stop=StopChannel(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
            terminal=self._terminal if self.folder is not None or self.place.rank else sys.stderr,
            restart=self.restart if again else None,
            note=self._note,
        )

    def open_group(self, device_type: str, gathers: bool = False) -> None:
        """Open the default process group, once."""
        if not dist.is_initialized():
            timeout = timedelta(seconds=timeout_seconds(os.environ))
            open_process_group(device_type, self.place.local_rank, timeout, self.store.for_group(), gathers)
            # A group that is open when the interpreter ends may abort the process: its threads still run.
            atexit.register(self.close_group)

    def leave(self) -> None:
        """Tell ranks that wait for this one that its script has ended; a store that is gone has nobody waiting.

        Our launcher keeps the store. Another may leave it to rank 0, which then must have asked for it.
        """
        if self.place.ours or self._store is not None:
            with suppress(RuntimeError, ShardwiseError):
                self.store.leave()

    def close_group(self) -> None:
        """Close the process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()


class _Holder:
    worker: ScriptWorker | None = None


def script_worker() -> ScriptWorker | None:
    """This process's worker; made here under another launcher; None in a process that no launcher started."""
    if _Holder.worker is None:
        place = current_place(os.environ)
        if place is not None:
            _Holder.worker = ScriptWorker(place, None, None)
            atexit.register(_Holder.worker.leave)
    return _Holder.worker


def begun_in(job_dir: Path) -> Path:
    """Where a worker's log and errors lie at first: where an attempt before has failed, and the launcher looks."""
    return output_of(job_dir) or job_dir


def entry(job_dir: Path, script: Script, restart: Restart | None = None) -> dict[str, Any] | None:
    """Run one worker of a script's job; returns and ends as :func:`shardwise.launch.worker.entry` does."""
    place = current_place(os.environ)
    assert place is not None, "started without a launcher"

    def folder() -> Path:
        return (_Holder.worker.folder if _Holder.worker else None) or begun_in(job_dir)

    def body(terminal: TextIO | None, note: Callable[[str], None]) -> dict[str, Any]:
        _Holder.worker = worker = ScriptWorker(place, job_dir, terminal, note, restart)
        use_cores(os.environ)
        # A setting of the fork server, not of the programs that the script may start.
        os.environ.pop("PYTHONSAFEPATH", None)
        try:
            _run(script)
        except Stopped as stopped:
            return {"stopped": stopped.signal_name}
        finally:
            worker.leave()
        worker.close_group()
        return {}

    return guarded(folder, body, muted=True, notes=job_dir)


def _run(script: Script) -> None:
    """As ``python FILE`` or ``python -m NAME`` would."""
    sys.argv = [script.name, *script.arguments]
    if script.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(script.name).parent))
    runpy.run_path(script.name, run_name="__main__")
