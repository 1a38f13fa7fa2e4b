"""``python -m shardwise.launch.opening FILE ARGUMENTS``: the script of ``shardwise run`` until its first contact.

As ``python FILE ARGUMENTS``, but that an error of the script has the exit status that it has in the job that follows.
Imports no torch.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

from shardwise.errors import LaunchError, ShardwiseError


def main(file: str, arguments: list[str]) -> int:
    """Run the script; returns the exit status of the contract where it raises, 0 at its end."""
    path = os.path.abspath(file)
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        traceback.print_exception(error.with_traceback(_from(path, error.__traceback__)))
        print(f"{file} failed before its processes were started: {type(error).__name__}: {error}", file=sys.stderr)
        return LaunchError.exit_code
    return 0


def _from(file: str, trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on; none where its text is no Python."""
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
