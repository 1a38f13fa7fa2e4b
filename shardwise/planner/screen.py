"""Quick judgement of all candidates at once: a bound on their time, a guess of it, and whether memory can do.

The formulas are those of :mod:`shardwise.planner.cost` over columns of candidates. What needs the stages one by one
is replaced: times by those of an average stage, the pipeline by its closed form. The search then estimates the best
of them stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.planner.bounds import held_inverses
from shardwise.planner.buffers import communicator_bytes
from shardwise.planner.compute import rank_tokens
from shardwise.planner.data import data_seconds, exposed, optimizer_seconds, sharded_terms
from shardwise.planner.gathered import job_gathered_bytes
from shardwise.planner.halves import deferred_seconds
from shardwise.planner.job import Job
from shardwise.planner.layout import Layout
from shardwise.planner.memory import (
    block_heap_bytes,
    other_heap_bytes,
    slack_share,
)
from shardwise.planner.parts import Placed, tied_copy
from shardwise.planner.rates import Rates, blocks_by_kind, commonest, rates_of
from shardwise.planner.space import (
    MOST_VIRTUAL,
    Columns,
    Space,
    levels,
    sequence_choices,
    shard_degrees,
    with_schedules,
)
from shardwise.planner.state import gradients_apart, state_terms
from shardwise.spec.block import RECOMPUTE_LEVELS, PartCosts

AXES = ("tp", "cp", "pp", "dp", "m", "ep", "v", "halves")
JUDGED = ("sp", "table", "level", "shard", "reshard", "seconds", "bound", "need", "unit", "later", "ahead", "behind")


@dataclass(frozen=True)
class Screened:
    """Columns of candidates: ``AXES``, ``sp table level shard reshard``, and what was found of each.

    ``table`` is the place in :attr:`shardwise.planner.job.Job.by_table`. ``seconds`` is a guess of the step's time,
    ``bound`` what it cannot be faster than, ``need`` bytes of the fullest device with blocks shared out as memory
    wants it. ``unit`` are the seconds of a micro-batch in a block of the commonest kind; ``later`` and ``ahead`` the
    shares of it that a second half and the forward pass take; ``behind`` what follows the last block, in units.
    """

    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["seconds"])

    def where(self, mask: np.ndarray) -> Screened:
        return Screened({name: column[mask] for name, column in self.columns.items()})


@dataclass
class Group:
    """Rows of one tensor degree and its tables, with or without sequence parallel, at one recompute level, by bounds.

    ``rates`` are those of ``cells``, the (cp, ep, rows of a micro-batch) that occur; ``cell`` says which is a row's.
    ``job`` is that under the tables, ``table`` their place among all.
    """

    job: Job
    table: int
    layout: Layout
    columns: Columns
    rates: Rates

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
        for table, own, split in _splits(job, int(tp)):
            for level in levels(job):
                layout = replace(split, recompute=level)  # type: ignore[arg-type]
                few = replace(layout, cp=rows["cp"][first], ep=rows["ep"][first], micro_batch=rows["m"][first])
                rates = rates_of(own, few, len(first))
                free, ends = rates.forward + rates.backward, rates.first + rates.last
                middle = (job.costs.num_blocks * free + ends)[cell] / rows["pp"]
                bound = number * np.maximum(middle, (free + rates.last)[cell] / job.cluster.chip.shared)
                order = np.argsort(bound, kind="stable")
                more = {"cell": cell, "number": number, "bound": bound}
                columns = {name: column[order] for name, column in (rows | more).items()}
                groups.append(Group(own, table, layout, columns, rates))
    return groups


def judge(group: Group, columns: Columns) -> tuple[Screened, Space]:
    """Judge some rows of a group with every number of virtual stages and every way to share out weights."""
    job = group.job
    space = with_schedules(job, columns)
    parts = _judge(job, group, _with_shards(job, space.columns, group.layout.tp)) if len(space) else []
    names = (*AXES, *JUDGED)
    if not parts:
        return Screened({name: np.zeros(0) for name in names}), space
    return Screened({name: np.concatenate([part[name] for part in parts]) for name in names}), space


def _splits(job: Job, tp: int) -> Iterator[tuple[int, Job, Layout]]:
    """Every way to split the tensor axis at a degree: the tables' place, the job under them, the layout."""
    for table, own in enumerate(job.by_table.values()):
        parts = (*own.costs.kinds, own.costs.embedding, own.costs.head)
        if table and (tp == 1 or any(part.degree(tp).rule for part in parts)):
            continue
        for sequence_parallel in sequence_choices(job):
            can = tp > 1 and all(part.degree(tp).sequence is not None for part in parts)
            if can or not sequence_parallel:
                yield table, own, Layout(tp, sequence_parallel=sequence_parallel)


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
        some["table"] = np.full(len(some["tp"]), group.table)
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


def _judge_rows(job: Job, layout: Layout, rows: Columns, of_cells: Rates) -> Columns:
    rates = Rates(**{name: getattr(of_cells, name)[rows["cell"]] for name in of_cells.__dataclass_fields__})
    number = rows["number"]
    need, share = _memory(job, layout, rows, rates, number)
    again = rates.again * share
    blocks = job.costs.num_blocks / rows["pp"]
    forward = rates.forward
    backward = rates.backward + again + rows["halves"] * _deferred_seconds(job)
    passes = 2 * rows["v"] * (rows["pp"] > 1) * job.work.host.stage_pass * job.cluster.chip.kernel_seconds
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
    everything = job.costs.num_blocks * block + rates.first + rates.last + rows["pp"] * passes
    slowest = _slowest_stage(job, rows, block, rates) + passes
    hop = _hop_seconds(job, layout, rows) * (rows["pp"] > 1)
    fill = (everything - slowest) * (rows["pp"] - 1) / rows["pp"] / rows["v"] + 2 * (rows["pp"] - 1) * hop
    # ZB-H1: second halves, which fill the end of the step, are no part of what others wait for.
    filled = 1 - rows["halves"] * np.minimum(2 * rates.waiting / block, 1)
    fill = fill * filled
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
        "bound": np.maximum(rows["bound"], _least_seconds(job, layout, rows, rates, held)),
    } | _units(job, layout, rows, rates)
    # Full recompute of no block is another spelling of none.
    same = share > 0 if layout.recompute == "full" and "recompute" not in job.fixed else np.ones(width, dtype=bool)
    return {name: column[same] for name, column in (rows | found).items()}


def _units(job: Job, layout: Layout, rows: Columns, rates: Rates) -> Columns:
    """What :func:`shardwise.planner.bounds.least_blocks` takes of each row."""
    forward, backward = rates.unit_forward, rates.unit_backward
    if layout.zero == 3:
        placed = (job.costs.kinds[commonest(job)[0]], 1, layout.recompute)
        gathers, both = sharded_terms(placed, layout, job.work, job.cluster)
        forward = forward + exposed(gathers, rates.unit_forward, job.work.overlap_data)
        backward = backward + exposed(both, rates.unit_backward + rates.again, job.work.overlap_data)
    unit = forward + backward
    later = rows["halves"] * rates.unit_later / unit
    return {"unit": unit, "later": later, "ahead": forward / unit, "behind": rates.last / unit}


def _least_seconds(job: Job, layout: Layout, rows: Columns, rates: Rates, held: list[Placed]) -> Any:
    """Seconds that no cut into stages and no number of recomputed blocks can be below.

    The slowest rank takes at least as long as the ranks' mean. Traffic that computing does not hide, and the
    optimizer's step, are convex in what a rank holds, so their mean is at least what an average rank has.

    And rank r, with b_r seconds a micro-batch, waits for its first one, and those before it for its last gradient: M
    b_r + sum over s < r of c b_s, for whole backward passes with c = 1. Whatever the cut, the largest of these is at
    least c E / (1 - (1 - c / M)^p), E being the sum of all b: the cut under which all are equal. With several stages a
    rank those before it have run a block at least.
    """
    work, cluster, pp = job.work, job.cluster, rows["pp"]
    forward, backward = rates.forward, rates.backward + rates.again * _least_recomputed(job, layout, rows, rates, held)
    blocks, rest = job.costs.num_blocks, rates.first + rates.last
    sums: Any = 0.0
    if layout.zero == 3:
        traffic = [
            (times / blocks, sharded_terms((kind, 1, layout.recompute), layout, work, cluster))
            for kind, times in blocks_by_kind(job)
        ]
        gathers, both = (sum(share * terms[index] for share, terms in traffic) for index in (0, 1))
        forward = forward + exposed(gathers, forward, work.overlap_data)
        backward = backward + exposed(both, backward, work.overlap_data)
    else:
        sent, gathered = data_seconds(held, layout, work, cluster)
        beside = (blocks * (rates.forward + rates.backward + rates.again) + rest) / pp
        sums = exposed(sent, beside, work.overlap_data) + exposed(gathered, beside, work.overlap_data)
    everything, number = blocks * (forward + backward) + rest, rows["number"]
    mean = number * everything / pp
    if cluster.chip.shared <= 1:  # else the rank that ends last need not have the most traffic
        mean = mean + sums + optimizer_seconds(held, layout, work, cluster)
    # With whole backward passes all of it, in halves only what a forward pass takes of a block.
    first = rates.forward_share if layout.zero != 3 else np.full(len(pp), 1e-9)
    share = np.where(rows["halves"] > 0, np.maximum(first, 1e-9), 1.0)
    of = np.where(rows["halves"] > 0, blocks * (forward + backward), everything)
    filled = share * of / -np.expm1(pp * np.log1p(-share / np.maximum(number, 1 + 1e-9)))
    apart = number * everything / pp + (pp - 1) / 2 * (rates.forward + rates.backward)
    # Where processes share a core, one that waits leaves it to the others.
    return np.maximum(mean, np.where(rows["v"] > 1, apart, filled) / max(1.0, cluster.chip.shared))


def _least_recomputed(job: Job, layout: Layout, rows: Columns, rates: Rates, held: list[Placed]) -> Any:
    """The share of blocks that any cut must compute again.

    Rank r of p holds p - r micro-batches of each of its blocks at least. Where it has several stages, it holds p of
    each stage but the last, and min(p, 2 (p - 1 - r) + 1) of that; cuts that are looked at give the last one no more
    blocks than the others. Its memory over that number, summed over the ranks, is at least what all blocks keep of one
    micro-batch, and at most the limit times the sum of these numbers' inverses.
    """
    if layout.recompute != "full" or job.fixed.get("recompute") == "full":
        return 1.0
    pp, blocks = rows["pp"], job.costs.num_blocks
    even = not job.fixed.get("stages") and len(set(job.costs.order)) == 1
    inverses = held_inverses(blocks, MOST_VIRTUAL, even)[np.minimum(rows["v"], MOST_VIRTUAL) - 1, pp]
    state = sum(times * _state_bytes(job, layout, [part]) for part, times, _ in held)
    if layout.zero:  # what the heap keeps is less where activations are more
        state = state - sum(
            times * block_heap_bytes(part, layout.recompute, layout, job.work) for part, times, _ in held
        )
    spare = job.limit_bytes * inverses - state - blocks * rates.saved
    gain = blocks * (rates.saved_all - rates.saved)
    return np.where(gain > 0, np.clip(1 - spare / np.maximum(gain, 1), 0, 1), 0.0)


def _average_parts(job: Job, layout: Layout, rows: Columns) -> list[Placed]:
    """What a rank in the middle holds, in shares of parts, and the embedding's share."""
    parts: list[Any] = [(kind, times / rows["pp"], layout.recompute) for kind, times in blocks_by_kind(job)]
    parts += [(job.costs.embedding, 1.0 / rows["pp"], "none"), (job.costs.head, 1.0 / rows["pp"], "none")]
    if job.costs.tied:
        parts.append((tied_copy(job.costs), (rows["pp"] > 1) / rows["pp"], "none"))
    return parts


def _state_bytes(job: Job, layout: Layout, parts: list[PartCosts]) -> Any:
    """Weights, gradients and optimizer state, as :mod:`shardwise.planner.state` counts them, and what the heap keeps.

    Gradients that come as activations go are left out: activations are taken to be more.
    """
    terms = state_terms([(part, 1, "none") for part in parts], layout, job.work)
    terms["heap"] = sum(block_heap_bytes(part, layout.recompute, layout, job.work) for part in parts)
    return sum(terms.values()) - np.where(gradients_apart(layout, job.work), terms["gradients"], 0.0)


def _memory(job: Job, layout: Layout, rows: Columns, rates: Rates, number: np.ndarray) -> tuple[Any, Any]:
    """Bytes of the fullest rank, and the share of blocks that must be recomputed to stay below the limit (1: all).

    Blocks are taken as evenly shared out; the first rank holds the most micro-batches, the last one the logits.
    """
    pp, v, num_blocks = rows["pp"], rows["v"], job.costs.num_blocks
    blocks = num_blocks / pp
    state = sum(times * _state_bytes(job, layout, [kind]) for kind, times in blocks_by_kind(job)) / num_blocks
    ends = [_state_bytes(job, layout, [job.costs.embedding]), _state_bytes(job, layout, [job.costs.head])]
    if job.costs.more:
        ends[1] = ends[1] + _state_bytes(job, layout, list(job.costs.more))
    if job.costs.tied:
        ends[1] = ends[1] + (pp > 1) * _state_bytes(job, layout, [tied_copy(job.costs)])
    first_round = -(-number // np.maximum(number // pp, 1))
    chunks = np.minimum((v - 1) * first_round + 2 * (pp - 1) + 1, number * v) / v
    inflight = np.where(v > 1, chunks, number if job.fixed.get("schedule") == "gpipe" else np.minimum(pp, number))
    slack = 1 + slack_share(job.work)
    gathered = job_gathered_bytes(job, layout)
    base = job.work.base_bytes + gathered + rates.workspace * slack
    base = base + other_heap_bytes(rates.workspace, layout, job.work)
    if job.work.counted == "device":
        base = base + communicator_bytes(layout, job.cluster)
    beside_head = np.maximum(rates.workspace_last - rates.workspace, 0.0) * slack
    beside_first = np.maximum(rates.workspace_first - rates.workspace, 0.0) * slack
    first = base + ends[0] + rates.saved_first * inflight * slack + np.where(pp == 1, ends[1], 0.0)
    logits = other_heap_bytes(rates.saved_last, layout, job.work) - other_heap_bytes(0.0, layout, job.work)
    logits = logits + rates.saved_last * slack
    with_head = logits + np.maximum(beside_head, beside_first)
    first = first + np.where(pp == 1, with_head, beside_first)
    last = base + ends[1] + logits + beside_head
    kinds = blocks_by_kind(job)
    heap = sum(times * block_heap_bytes(kind, layout.recompute, layout, job.work) for kind, times in kinds)
    heap = heap / num_blocks * (layout.zero > 0)
    state = state - heap

    def activations(number_held: Any) -> Any:
        """Of a block, with what the heap keeps where data ranks share out, as :mod:`shardwise.planner.host` has it."""
        return number_held * rates.saved * slack + np.maximum(heap - (number_held - 1 / v) * rates.saved, 0.0)

    per_block = state + activations(inflight)
    # The last rank's first halves run ahead of the second ones, by a micro-batch for each rank before it.
    ahead = rows["halves"] * (pp - 1) * rates.waiting_bytes * slack
    last_held = np.where(v > 1, inflight - (pp - 1) * 2 / v, 1)
    last_block = state + activations(last_held) + ahead
    # Whole blocks can move from the first ranks, which hold most, to later ones: an average rank's load decides.
    average = state + (activations(inflight) + activations(last_held)) / 2 + ahead / 2
    even = np.where(pp == 1, first + blocks * per_block, base + blocks * average + (first + last - 2 * base) / pp)
    need = np.maximum(even, np.maximum(first + per_block, last + last_block))
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


def _deferred_seconds(job: Job) -> float:
    """Of an average block, as :mod:`shardwise.planner.cost` has it."""
    seconds = sum(times * deferred_seconds(kind, job.work, job.cluster) for kind, times in blocks_by_kind(job))
    return seconds / job.costs.num_blocks


def _slowest_stage(job: Job, rows: Columns, block: Any, rates: Rates) -> Any:
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
        seconds = np.where(within, link.send_seconds(size), seconds)
    return seconds


def least_device_seconds(job: Job, columns: Columns) -> float:
    """Device-seconds of a row that no candidate, on any number of devices, can be below.

    Args:
        columns: ``tp cp ep m`` in every combination that occurs.
    """
    least = float("inf")
    for tp in np.unique(columns["tp"]):
        rows = {name: column[columns["tp"] == tp] for name, column in columns.items()}
        for _, own, split in _splits(job, int(tp)):
            layout = replace(split, cp=rows["cp"], ep=rows["ep"], micro_batch=rows["m"])
            rates = rates_of(own, layout, len(rows["cp"]))
            seconds = job.costs.num_blocks * (rates.forward + rates.backward) + rates.first + rates.last
            least = min(least, float((seconds * tp * rows["cp"] / rows["m"]).min()))
    return least
