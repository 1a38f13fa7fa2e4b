"""One checkpoint on its way to the disk: written beside, checked, and given its name when all of it is there.

The plan of who writes what is made by all ranks together, and so is the end; between them each rank writes its own
file without a word to the others. So a background save needs no collective of its own, and what the ranks agree on
in each step tells when all are through.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import save_error
from shardwise.checkpoint.listing import (
    MANIFEST_FILE,
    STATE_FILE,
    FileRecord,
    checkpoint_name,
    draft_of,
    is_unlisted,
    manifest_text,
    read_manifest,
    record_of,
)
from shardwise.checkpoint.reader import unlisted_damage
from shardwise.checkpoint.shelf import set_aside, sweep
from shardwise.checkpoint.store import SlicedTensor, owned_bytes, snapshot
from shardwise.checkpoint.writing import Pace, SummedFiles
from shardwise.errors import SaveError

_COPY_AHEAD_BYTES = 10**7  # from a device, while others are written; DCP's own default
_NICE = 10  # of a thread that writes while steps are made


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds.

    Attributes:
        step: steps that are done.
        tensors: this rank's slices, which may share live storage.
        state: what ``state.json`` is to hold.
        source: configuration and tokenizer, so that a checkpoint says by itself which model it is of.
        write_more: called by all ranks with the folder before it gets its name; writes what else belongs in it.
        num_bytes: of the whole checkpoint, for messages; 0: not known.
    """

    step: int
    tensors: Mapping[str, SlicedTensor]
    state: Mapping[str, Any]
    source: Companions
    write_more: Callable[[Path], None] | None = None
    num_bytes: int = 0


class SaveJob:
    """A checkpoint that is being written; made, and finished, by all ranks together.

    Args:
        folder: where it gets its name.
        background: take a copy of the tensors and write that in a thread, so that training goes on meanwhile.
        within: seconds in which a rank is to have written, in the background, where its disk is fast enough.

    Raises:
        SaveError: on every rank, if one cannot write. What was there before is untouched.
    """

    def __init__(self, folder: Path, content: Content, *, background: bool = False, within: float = math.inf) -> None:
        self.final = folder / checkpoint_name(content.step)
        self._draft, self._content = draft_of(self.final), content
        self._failure: SaveError | None = None
        self._results: list[Any] = []
        self._records: dict[str, FileRecord] = {}
        self._thread: threading.Thread | None = None
        _agree(self._open() if dist.get_rank() == 0 else None)
        tensors = snapshot(content.tensors) if background else dict(content.tensors)
        # A copy lies on the host: to ask for a stream, in a thread of its own, would open a context on device 0.
        ahead = 0 if background else _COPY_AHEAD_BYTES
        self._planner = DefaultSavePlanner()
        self._writer = FileSystemWriter(self._draft, per_thread_copy_ahead=ahead)
        self._pace = Pace(owned_bytes(tensors), torch.get_num_threads(), within) if background else None
        self._files = SummedFiles(self._pace)
        self._writer.fs = self._files
        self._plan, self._metadata = _make_plan(self._planner, self._writer, tensors)
        if content.write_more is not None:
            content.write_more(self._draft)
        if background:
            self._thread = threading.Thread(target=self._write_politely, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write()

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing more to write, or cannot."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether this rank could not write."""
        return self._failure is not None

    def finish(self) -> Path:
        """Wait until all ranks have written, and give the checkpoint its name; its folder.

        Raises:
            SaveError: on every rank, if one could not write.
        """
        if self._thread is not None and self._pace is not None:
            self._pace.hurry()
            self._thread.join()
        try:
            _agree(self._failure)
            everything: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object((self._results, self._records), everything)
            _agree(None if everything is None else self._publish(everything))
        except SaveError:
            if dist.get_rank() == 0:
                shutil.rmtree(self._draft, ignore_errors=True)
            raise
        return self.final

    def _open(self) -> SaveError | None:
        """Make the folder that is written to; what an interrupted save has left there goes."""
        sweep(self.final.parent)
        return self._caught(self._make_draft)

    def _make_draft(self) -> None:
        self._draft.mkdir(parents=True)
        self._content.source.copy_to(self._draft)

    def _caught(self, act: Callable[[], None]) -> SaveError | None:
        try:
            act()
        except SaveError as error:
            return error
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return save_error(self.final, error, self._content.num_bytes)
        return None

    def _write_politely(self) -> None:
        """Write in the background: steps go first where cores are few."""
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        if self._pace is not None:
            self._pace.begin()
        self._write()

    def _write(self) -> None:
        self._failure = self._caught(self._write_own_files)

    def _write_own_files(self) -> None:
        written = self._writer.write_data(self._plan, self._planner)
        self._results = written.wait()
        for name, checksum in self._files.checksums.items():
            self._records[name] = FileRecord((self._draft / name).stat().st_size, checksum)

    def _publish(self, everything: list[Any]) -> SaveError | None:
        return self._caught(lambda: self._give_name(everything))

    def _give_name(self, everything: list[Any]) -> None:
        """On rank 0, when every rank has written: the lists, and the name as the last of all."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, [results for results, _ in everything])
        _write_durably(self._draft / STATE_FILE, json.dumps(dict(self._content.state), indent=2) + "\n")
        records = {name: record for _, own in everything for name, record in own.items()}
        for stored in self._metadata.storage_data.values():
            if stored.offset + stored.length > records[stored.relative_path].bytes:
                raise OSError(f"{stored.relative_path} is shorter than what was written to it")
        for path in self._draft.rglob("*"):
            name = str(path.relative_to(self._draft))
            if path.is_dir():
                _sync_folder(path)
            elif name not in records:  # those that are have been synced by DCP
                records[name] = record_of(path)
                _sync_file(path)
        _write_durably(self._draft / MANIFEST_FILE, manifest_text(self._content.step, records))
        _sync_folder(self._draft)
        if self.final.exists():  # one that was passed over, as damaged
            set_aside(self.final)
        self._draft.rename(self.final)
        _sync_folder(self.final.parent)


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, SlicedTensor], state: Mapping[str, Any], source: Companions
) -> Path:
    """Write a checkpoint from all ranks together; on return it is complete under its name.

    Raises:
        SaveError: it could not be written. What was there before is untouched.
    """
    return SaveJob(folder, Content(step, tensors, state, source)).finish()


def damage_in(checkpoint: Path) -> str:
    """What in a complete checkpoint is not as it was written, by the content of its files; empty if nothing.

    To be called by all ranks, each of which reads a share; or by a process without any others. Of one without a list of
    its files the sizes are compared alone.
    """
    if is_unlisted(checkpoint):
        return unlisted_damage(checkpoint)
    _, files = read_manifest(checkpoint)
    alone = not dist.is_initialized()
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    own = sorted(files)[rank::world_size]
    wrong = next((name for name in own if record_of(checkpoint / name) != files[name]), None)
    found = [wrong]
    if not alone:
        found = [None] * world_size
        dist.all_gather_object(found, wrong)
    name = next((name for name in found if name is not None), None)
    return "" if name is None else f"the content of its {name} is not what was written"


def _make_plan(
    planner: DefaultSavePlanner, writer: FileSystemWriter, tensors: Mapping[str, SlicedTensor]
) -> tuple[SavePlan, Metadata | None]:
    """What this rank writes; on rank 0 also what the whole checkpoint will hold."""
    is_main, world_size = dist.get_rank() == 0, dist.get_world_size()
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_main)
    writer.set_up_storage_writer(is_main, rank=dist.get_rank(), use_collectives=True)
    own = writer.prepare_local_plan(planner.create_local_plan())
    plans: list[Any] | None = [None] * world_size if is_main else None
    dist.gather_object(own, plans)
    metadata = None
    if plans is not None:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    central: list[Any] = [None]
    dist.scatter_object_list(central, plans)
    return planner.finish_plan(central[0]), metadata


def _agree(failure: SaveError | None) -> None:
    """Raise what a rank could not do, on every rank alike, so that none waits for one that has left."""
    failures: list[SaveError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, error in enumerate(failures):
        if error is not None:
            raise error.of_rank(rank)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_file(path: Path) -> None:
    """Have the system keep what others have written: a name must not outlive its content."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Have the system keep the names in a folder, where it can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
