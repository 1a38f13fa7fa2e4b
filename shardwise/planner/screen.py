"""Quick judgement of all candidates at once: a bound on their time, a guess of it, and whether memory can do.

The formulas are those of :mod:`shardwise.planner.cost` over columns of candidates. What needs the stages one by one
is replaced: times by those of an average stage, the pipeline by its closed form. The search then estimates the best
of them stage by stage.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.planner.compute import part_passes, rank_tokens, total
from shardwise.planner.data import data_seconds, dense_and_expert, exposed, optimizer_seconds, sharded_terms
from shardwise.planner.job import Job
from shardwise.planner.layout import Layout
from shardwise.planner.memory import saved_bytes, slack_share, workspace_bytes
from shardwise.planner.parts import Placed, tied_copy
from shardwise.planner.space import Columns, Space, levels, sequence_choices, shard_degrees, with_virtual_stages
from shardwise.planner.state import gathered_bytes, state_terms
from shardwise.spec.block import RECOMPUTE_LEVELS, PartCosts, RecomputeLevel

AXES = ("tp", "cp", "pp", "dp", "m", "ep", "v")
_BOUND_FIELDS = ("sp", "level", "shard", "reshard", "seconds", "bound", "need")


@dataclass(frozen=True)
class Screened:
    """Columns of candidates: ``AXES``, ``sp level shard reshard``, and what was found of each.

    ``seconds`` is a guess of the step's time, ``bound`` what it cannot be faster than, ``need`` bytes of the fullest
    device with blocks shared out as memory wants it.
    """

    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["seconds"])

    def where(self, mask: np.ndarray) -> Screened:
        return Screened({name: column[mask] for name, column in self.columns.items()})


@dataclass(frozen=True)
class _Rates:
    """Of one micro-batch on one rank, by row of the group: of an average block, the embedding, the head."""

    forward: Any
    backward: Any
    again: Any
    first: Any
    last: Any
    saved: Any
    saved_all: Any
    saved_first: Any
    saved_last: Any
    workspace: Any
    workspace_last: Any


@dataclass
class Group:
    """Rows of one tensor degree, with or without sequence parallel, at one recompute level, by their bounds.

    ``rates`` are those of ``cells``, the (cp, ep, rows of a micro-batch) that occur; ``cell`` says which is a row's.
    """

    layout: Layout
    columns: Columns
    rates: _Rates

    def __len__(self) -> int:
        return len(self.columns["bound"])


def groups_of(job: Job, space: Space) -> list[Group]:
    """All rows of a space with a bound on their time, the lowest first."""
    groups = []
    for tp in np.unique(space.columns["tp"]):
        rows = {name: column[space.columns["tp"] == tp] for name, column in space.columns.items()}
        key = (rows["cp"] * 65536 + rows["ep"]) * 65536 + rows["m"]
        _, first, cell = np.unique(key, return_index=True, return_inverse=True)
        number = job.rows // (rows["dp"] * rows["m"])
        for sequence_parallel in sequence_choices(job):
            if (sequence_parallel and tp == 1) or not _can(job, int(tp), sequence_parallel):
                continue
            for level in levels(job):
                layout = Layout(int(tp), sequence_parallel=sequence_parallel, recompute=level)  # type: ignore[arg-type]
                few = replace(layout, cp=rows["cp"][first], ep=rows["ep"][first], micro_batch=rows["m"][first])
                rates = _few_rates(job, few, len(first))
                free, ends = rates.forward + rates.backward, rates.first + rates.last
                middle = (job.costs.num_blocks * free + ends)[cell] / rows["pp"]
                bound = number * np.maximum(middle, (free + rates.last)[cell] / job.cluster.chip.shared)
                order = np.argsort(bound, kind="stable")
                more = {"cell": cell, "number": number, "bound": bound}
                columns = {name: column[order] for name, column in (rows | more).items()}
                groups.append(Group(layout, columns, rates))
    return groups


def judge(job: Job, group: Group, columns: Columns) -> tuple[Screened, Space]:
    """Judge some rows of a group with every number of virtual stages and every way to share out weights."""
    space = with_virtual_stages(job, columns)
    parts = _judge(job, group, _with_shards(job, space.columns, group.layout.tp)) if len(space) else []
    names = (*AXES, *_BOUND_FIELDS)
    if not parts:
        return Screened({name: np.zeros(0) for name in names}), space
    return Screened({name: np.concatenate([part[name] for part in parts]) for name in names}), space


def _can(job: Job, tp: int, sequence_parallel: bool) -> bool:
    parts = (*job.costs.kinds, job.costs.embedding, job.costs.head)
    return not sequence_parallel or all(part.degree(tp).sequence is not None for part in parts)


def _with_shards(job: Job, rows: Columns, tp: int) -> Columns:
    """Every row with each way to share out weights over its data ranks."""
    key = rows["dp"] * 1_000_000 + rows["cp"]
    found: list[Columns] = []
    for value in np.unique(key):
        same = np.flatnonzero(key == value)
        dp, cp = int(value) // 1_000_000, int(value) % 1_000_000
        for shard, reshard in shard_degrees(job, dp, tp * cp):
            more = {"shard": np.full(len(same), shard), "reshard": np.full(len(same), reshard)}
            found.append({name: column[same] for name, column in rows.items()} | more)
    names = (*rows, "shard", "reshard")
    if not found:
        return {name: np.zeros(0, dtype=np.int64) for name in names}
    return {name: np.concatenate([part[name] for part in found]) for name in names}


def _judge(job: Job, group: Group, rows: Columns) -> list[Columns]:
    """The rows of a group, by what their data ranks share out."""
    judged = []
    for zero in (0, 1, 3):
        wanted = np.where(rows["shard"] == 1, 0, np.where(rows["reshard"], 3, 1)) == zero
        if not wanted.any():
            continue
        some = {name: column[wanted] for name, column in rows.items()}
        layout = replace(
            group.layout,
            zero=zero,
            cp=some["cp"],
            ep=some["ep"],
            dp=some["dp"],
            shard=some["shard"] * some["cp"] if zero else 1,
            micro_batch=some["m"],
            num_micro_batches=some["number"],
            pp=some["pp"],
            virtual_stages=some["v"],
        )
        judged.append(_judge_rows(job, layout, some, group.rates))
    return judged


def _judge_rows(job: Job, layout: Layout, rows: Columns, of_cells: _Rates) -> Columns:
    rates = _Rates(**{name: getattr(of_cells, name)[rows["cell"]] for name in of_cells.__dataclass_fields__})
    number = rows["number"]
    need, share = _memory(job, layout, rows, rates, number)
    again = rates.again * share
    blocks = job.costs.num_blocks / rows["pp"]
    forward, backward = rates.forward, rates.backward + again
    held = _average_parts(job, layout, rows)
    sums: Any = 0.0
    if layout.zero == 3:
        for placed in held:
            gathers, both = sharded_terms((placed[0], 1, placed[2]), layout, job.work, job.cluster)
            part = placed[1] / blocks
            forward = forward + part * exposed(gathers, rates.forward, job.work.overlap_data)
            backward = backward + part * exposed(both, rates.backward + again, job.work.overlap_data)
    if layout.zero != 3 or job.work.ours:
        sent, gathered = data_seconds(held, layout, job.work, job.cluster)
        sums = exposed(sent, blocks * backward, job.work.overlap_data)
        if layout.zero != 3:
            sums = sums + exposed(gathered, blocks * forward, job.work.overlap_data)
    block = forward + backward
    everything = job.costs.num_blocks * block + rates.first + rates.last
    slowest = _slowest_stage(job, rows, block, rates)
    hop = _hop_seconds(job, layout, rows) * (rows["pp"] > 1)
    fill = (everything - slowest) * (rows["pp"] - 1) / rows["pp"] / rows["v"] + 2 * (rows["pp"] - 1) * hop
    fill = np.where(rows["v"] > 1, (rows["pp"] - 1) * everything / rows["pp"] / rows["v"] + 2 * rows["pp"] * hop, fill)
    # Wrapped: fewer passes wait for each other where a rank has several stages.
    seconds = number * slowest + fill
    if job.cluster.chip.shared > 1:  # as shardwise.planner.cost has it
        seconds = np.maximum(seconds / job.cluster.chip.shared, number * everything / rows["pp"])
    seconds = seconds + sums + optimizer_seconds(held, layout, job.work, job.cluster)
    width = len(rows["tp"])
    found = {
        "sp": np.full(width, layout.sequence_parallel),
        "level": np.full(width, RECOMPUTE_LEVELS.index(layout.recompute)),
        "seconds": seconds,
        "need": need,
    }
    # Full recompute of no block is another spelling of none.
    same = share > 0 if layout.recompute == "full" and "recompute" not in job.fixed else np.ones(width, dtype=bool)
    return {name: column[same] for name, column in (rows | found).items()}


def _few_rates(job: Job, layout: Layout, width: int) -> _Rates:
    costs, work = job.costs, job.work
    plain = replace(layout, recompute="none")
    sums: dict[str, Any] = dict.fromkeys(("forward", "backward", "again", "saved", "saved_all", "workspace"), 0.0)
    for kind, times in _kinds(job):
        share = times / costs.num_blocks
        passes = part_passes(kind, layout, work, job.cluster)
        for name in ("forward", "backward", "again"):
            sums[name] = sums[name] + share * total(getattr(passes, name))
        kept = _kept(kind, layout, job, layout.recompute)
        everything = _kept(kind, layout, job, "none")
        sums["saved"] = sums["saved"] + share * kept
        sums["saved_all"] = sums["saved_all"] + share * everything
        sums["workspace"] = np.maximum(sums["workspace"], workspace_bytes(kind, layout.recompute, layout, work))
    ends: list[Any] = []
    for parts in ((costs.embedding,), (costs.head, *costs.more)):
        passes_of = [part_passes(part, plain, work, job.cluster) for part in parts]
        ends.append(sum(total(one.forward) + total(one.backward) for one in passes_of))
    saved = [_kept(part, layout, job, "none") for part in (costs.embedding, costs.head)]
    more = sum((_kept(part, layout, job, "none") for part in costs.more), start=0.0)
    values = sums | {"first": ends[0], "last": ends[1], "saved_first": saved[0], "saved_last": saved[1] + more}
    values["workspace_last"] = workspace_bytes(costs.head, "none", layout, work)
    return _Rates(**{name: np.broadcast_to(np.asarray(value, dtype=float), (width,)) for name, value in values.items()})


def _kinds(job: Job) -> list[tuple[PartCosts, int]]:
    return [(job.costs.kinds[kind], times) for kind, times in sorted(Counter(job.costs.order).items())]


def _kept(part: PartCosts, layout: Layout, job: Job, level: RecomputeLevel) -> Any:
    return saved_bytes(part, level, layout, job.work)


def _average_parts(job: Job, layout: Layout, rows: Columns) -> list[Placed]:
    """What a rank in the middle holds, in shares of parts, and the embedding's share."""
    parts: list[Any] = [(kind, times / rows["pp"], layout.recompute) for kind, times in _kinds(job)]
    parts += [(job.costs.embedding, 1.0 / rows["pp"], "none"), (job.costs.head, 1.0 / rows["pp"], "none")]
    if job.costs.tied:
        parts.append((tied_copy(job.costs), (rows["pp"] > 1) / rows["pp"], "none"))
    return parts


def _state_bytes(job: Job, layout: Layout, parts: list[PartCosts]) -> Any:
    """Weights, gradients and optimizer state, as :mod:`shardwise.planner.state` counts them."""
    return sum(state_terms([(part, 1, "none") for part in parts], layout, job.work).values())


def _gathered_bytes(job: Job, layout: Layout) -> Any:
    """What comes and goes with the traffic of the data ranks, on a rank that has both ends or the larger one."""
    copies = [tied_copy(job.costs)] if job.costs.tied else []
    size = {
        name: sum(dense_and_expert([(part, 1, "none") for part in parts], layout, trainable=False))
        for name, parts in (
            ("first", [job.costs.embedding]),
            ("last", [job.costs.head, *copies]),
            ("both", [job.costs.embedding, job.costs.head]),
        )
    }
    ends = np.where(layout.pp > 1, np.maximum(size["first"], size["last"]), size["both"])
    if not job.work.ours:
        ends = np.maximum(size["first"], size["last"])
    blocks = [sum(dense_and_expert([(kind, 1, "none")], layout, trainable=False)) for kind in job.costs.kinds]
    return gathered_bytes(blocks, ends, layout, job.work)


def _memory(job: Job, layout: Layout, rows: Columns, rates: _Rates, number: np.ndarray) -> tuple[Any, Any]:
    """Bytes of the fullest rank, and the share of blocks that must be recomputed to stay below the limit (1: all).

    Blocks are taken as evenly shared out; the first rank holds the most micro-batches, the last one the logits.
    """
    pp, v, num_blocks = rows["pp"], rows["v"], job.costs.num_blocks
    blocks = num_blocks / pp
    state = sum(times * _state_bytes(job, layout, [kind]) for kind, times in _kinds(job)) / num_blocks
    ends = [_state_bytes(job, layout, [job.costs.embedding]), _state_bytes(job, layout, [job.costs.head])]
    if job.costs.more:
        ends[1] = ends[1] + _state_bytes(job, layout, list(job.costs.more))
    if job.costs.tied:
        ends[1] = ends[1] + (pp > 1) * _state_bytes(job, layout, [tied_copy(job.costs)])
    first_round = -(-number // np.maximum(number // pp, 1))
    chunks = np.minimum((v - 1) * first_round + 2 * (pp - 1) + 1, number * v) / v
    inflight = np.where(v > 1, chunks, number if job.fixed.get("schedule") == "gpipe" else np.minimum(pp, number))
    slack = 1 + slack_share(job.work, layout)
    gathered = _gathered_bytes(job, layout)
    base = job.work.base_bytes + gathered + rates.workspace * slack
    beside_head = np.maximum(rates.workspace_last - rates.workspace, 0.0) * slack
    first = base + ends[0] + rates.saved_first * inflight * slack + np.where(pp == 1, ends[1], 0.0)
    first = first + np.where(pp == 1, rates.saved_last * slack + beside_head, 0.0)
    last = base + ends[1] + rates.saved_last * slack + beside_head
    per_block = state + inflight * rates.saved * slack
    last_block = state + np.where(v > 1, inflight - (pp - 1) * 2 / v, 1) * rates.saved * slack
    # Whole blocks can move from the first ranks, which hold most, to later ones: an average rank's load decides.
    average = state + (inflight + np.where(v > 1, inflight - (pp - 1) * 2 / v, 1)) / 2 * rates.saved * slack
    need = np.maximum(base + blocks * average, np.maximum(first + per_block, last + last_block))
    if layout.recompute != "full":
        return need, np.ones(len(pp)) if layout.recompute != "none" else np.zeros(len(pp))
    gain = blocks * inflight * (rates.saved_all - rates.saved) * slack
    spare = job.limit_bytes - first - blocks * per_block
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(gain > 0, np.clip(1 - spare / gain, 0, 1), 0.0)
    if isinstance(job.fixed.get("recompute"), int):
        share = np.minimum(job.fixed["recompute"] / np.maximum(blocks / v, 1), 1.0)
    elif job.fixed.get("recompute") == "full":
        share = np.ones(len(pp))
    return need, share


def _slowest_stage(job: Job, rows: Columns, block: Any, rates: _Rates) -> Any:
    """Seconds of the slowest rank for a micro-batch, with whole blocks in a stage."""
    pp, v, num_blocks = rows["pp"], rows["v"], job.costs.num_blocks
    even = (num_blocks * block + rates.first + rates.last) / pp
    least = np.maximum(even, np.maximum(rates.last, rates.first) + np.where(pp > 1, block, 0.0))
    # Whole blocks: of all bounds that a number of blocks makes, the first under which every block finds a place.
    blocks = -(-num_blocks // pp)
    found = blocks * block + np.where(pp == 1, rates.first + rates.last, np.maximum(rates.first, rates.last))
    for fewer in (0, 1, 2, 3):
        for extra in (0.0, rates.first, rates.last):
            most = np.maximum((blocks - fewer) * block + extra, least) * (1 + 1e-9)
            places = np.floor((most - rates.first) / block) + np.floor((most - rates.last) / block)
            places = places + (pp - 2) * np.floor(most / block)
            found = np.where((pp > 1) & (places >= num_blocks) & (most < found), most, found)
    return np.where(v > 1, np.maximum(even, least), found)


def _hop_seconds(job: Job, layout: Layout, rows: Columns) -> Any:
    size = rank_tokens(layout, job.work) * job.costs.hidden_size * job.work.compute_bytes
    size = size / (layout.tp if layout.sequence_parallel else 1)
    stride = layout.tp * rows["cp"] * rows["dp"]
    seconds: Any = np.zeros(len(stride))
    for link in reversed(job.cluster.links):
        within = stride < link.devices if link.devices else np.ones(len(stride), dtype=bool)
        bandwidth = (link.pair_bandwidth or link.bandwidth) * link.efficiency
        seconds = np.where(within, link.latency + size / bandwidth, seconds)
    return seconds


def least_device_seconds(job: Job, columns: Columns) -> float:
    """Device-seconds of a row that no candidate, on any number of devices, can be below.

    Args:
        columns: ``tp cp ep m`` in every combination that occurs.
    """
    least = float("inf")
    for tp in np.unique(columns["tp"]):
        rows = {name: column[columns["tp"] == tp] for name, column in columns.items()}
        for sequence_parallel in sequence_choices(job):
            if (sequence_parallel and tp == 1) or not _can(job, int(tp), sequence_parallel):
                continue
            layout = Layout(int(tp), cp=rows["cp"], ep=rows["ep"], micro_batch=rows["m"])
            rates = _few_rates(job, replace(layout, sequence_parallel=sequence_parallel), len(rows["cp"]))
            seconds = job.costs.num_blocks * (rates.forward + rates.backward) + rates.first + rates.last
            least = min(least, float((seconds * tp * rows["cp"] / rows["m"]).min()))
    return least
