"""The machines of a job: which keys go together, and how many processes each machine starts."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.launch.place import Nodes


def nodes_of(count: int, rank: int, endpoint: str | None) -> Nodes:
    """The machines that ``nnodes``, ``node_rank`` and ``rdzv_endpoint`` describe.

    Raises:
        ConfigError: a rank outside the count, or several machines without a place to meet.
    """
    if not 0 <= rank < count:
        raise ConfigError(f"node_rank = {rank}, nnodes = {count}", "node_rank counts from 0", f"Use 0 to {count - 1}")
    if endpoint is None:
        if count > 1:
            rule = "needs rdzv_endpoint, where the machines meet"
            raise ConfigError(f"nnodes = {count}", rule, "Give rdzv_endpoint=HOST:PORT, HOST being machine 0")
        return Nodes()
    host, colon, port = endpoint.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"rdzv_endpoint = {endpoint!r}", "must be HOST:PORT", "For example 10.0.0.1:29400")
    if count == 1:
        raise ConfigError(f"rdzv_endpoint = {endpoint!r}", "has no effect with nnodes = 1", "Give nnodes, or leave it")
    return Nodes(count, rank, endpoint)


def local_processes(devices: int, nodes: Nodes) -> int:
    """Processes of one machine.

    Raises:
        ConfigError: the machines cannot have the same number of them.
    """
    if devices % nodes.count:
        below = devices // nodes.count * nodes.count
        near = " or ".join(str(number) for number in (below, below + nodes.count) if number)
        rule = f"the {nodes.count} machines (nnodes) must have the same number of processes"
        raise ConfigError(f"devices = {devices}", rule, f"Use devices={near}")
    return devices // nodes.count
