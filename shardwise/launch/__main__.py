"""``python -m shardwise.launch --devices N [-m MODULE | FILE] ARGUMENTS``: run a script in N processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXIT_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Launch, and return the exit status of the contract."""
    from shardwise.errors import ConfigError
    from shardwise.launch.agent import launch_script
    from shardwise.launch.nodes import nodes_of
    from shardwise.launch.place import preset_tree
    from shardwise.launch.script import Script

    option, number, *rest = arguments
    assert option == "--devices", "started by first contact"
    is_module = rest[0] == "-m"
    name, *script_arguments = rest[1:] if is_module else rest
    if not is_module and not Path(name).is_file():
        raise ConfigError(f"script {name}", "there is no such file", "Name a Python file")
    tree = preset_tree(os.environ)
    nodes = nodes_of(tree.get("nnodes", 1), tree.get("node_rank", 0), tree.get("rdzv_endpoint"))
    restarts = tree.get("restarts")
    restarts = restarts if isinstance(restarts, int) and restarts > 0 else 0  # another one the Trainer refuses
    return launch_script(Script(name, tuple(script_arguments), is_module), int(number), nodes=nodes, restarts=restarts)


if __name__ == "__main__":
    try:  # the imports are in here: Ctrl-C while they last is no traceback
        from shardwise.errors import ShardwiseError

        try:
            sys.exit(main(sys.argv[1:]))
        except ShardwiseError as error:
            print(f"shardwise: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
