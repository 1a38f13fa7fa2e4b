"""``train``: resolve, say what will run, launch, and say what came of it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from shardwise.front.fewer import on_fewer_devices
from shardwise.front.preparing import prepare_ahead
from shardwise.front.resolve import prepare
from shardwise.launch.agent import launch
from shardwise.launch.forkserver import PRELOAD_MORE
from shardwise.launch.lock import claim
from shardwise.launch.nodes import nodes_of
from shardwise.launch.output import write_run
from shardwise.log import say
from shardwise.report.answers import show_answers
from shardwise.report.console import show_plan
from shardwise.report.results import messages_console
from shardwise.spec.paths import local_path
from shardwise.train.previous import put_back


def train(tree: dict[str, Any]) -> int:
    """Train as the tree says; the exit code of the contract. To be called on the main thread, before torch is imported.

    Raises:
        ShardwiseError: what cannot run.
    """
    run, plan = prepare(tree)
    nodes = nodes_of(run.nnodes, run.node_rank, run.rdzv_endpoint)
    output_dir = local_path(run.output_dir)
    console = messages_console()
    env = {PRELOAD_MORE: "peft"} if run.lora else None
    if nodes.rank:  # machine 0 makes the folder and tells how the run went
        output_dir.mkdir(parents=True, exist_ok=True)
        return launch(output_dir, plan.devices, env=env, nodes=nodes)
    claim(output_dir)  # until this process ends
    show_plan(run, plan, console)
    prepare_ahead(run, plan, os.environ, nodes)  # what it refuses, or Ctrl-C meanwhile, leaves nothing in the folder
    write_run(run, plan)
    try:
        code = launch(output_dir, plan.devices, env=env, nodes=nodes, replan=on_fewer_devices)
    except BaseException:  # Ctrl-C before the launcher takes it, a terminal that has gone
        put_back(output_dir)
        raise
    export = output_dir / "export"
    if code == 0 and run.save.export:
        say("exported adapter:" if run.lora else "exported model:")
        with suppress(OSError):  # nobody reads on: the run is done all the same
            print(export, flush=True)
        try:
            show_answers(run, plan, export, console)
        except (KeyboardInterrupt, OSError):  # the run itself is done
            say("the answers are left out")
    return code
