"""``shardwise export``: which of the exports is asked for, with the refusals that need no weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.front.planning import parse_bytes
from shardwise.spec.paths import check_path

if TYPE_CHECKING:
    from shardwise.checkpoint.merge import Comparison


def write_export(
    source: Path, out: Path, *, merge: bool, base: Path | None, verify: bool, max_shard_size: str | None
) -> Comparison | None:
    """Write ``out``; what a comparison of logits found, None where none was asked for.

    Raises:
        ConfigError, CheckpointError: options that contradict each other, no checkpoint or no adapter, an ``out`` with
            something in it.
    """
    for key, path in (("source", source), ("out", out), ("base", base)):
        check_path(key, None if path is None else str(path))
    if merge:
        if verify or max_shard_size is not None:
            option = "--verify" if verify else "--max-shard-size"
            rule = "--merge always compares logits" if verify else "--merge writes files of transformers' own size"
            raise ConfigError(f"{option} with --merge", rule, f"Leave {option} out")
        from shardwise.checkpoint.merge import merge as write_merged

        return write_merged(source, out, base)
    if base is not None:
        raise ConfigError(f"--base {base}", "belongs to --merge", "Leave it out, or add --merge")
    max_bytes = None if max_shard_size is None else int(parse_bytes("--max-shard-size", max_shard_size))
    from shardwise.train.exporting import check_whole, export_checkpoint, find_checkpoint, verify_export

    checkpoint = find_checkpoint(source)
    for option in [*(["--verify"] if verify else []), *(["--max-shard-size"] if max_bytes else [])]:
        check_whole(checkpoint, option)
    export_checkpoint(checkpoint, out, max_bytes)
    return verify_export(checkpoint, out) if verify else None
