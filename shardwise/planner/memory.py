"""Memory of one pipeline rank at its peak, by named terms that sum to the total."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.planner.arrays import largest
from shardwise.planner.buffers import bucket_bytes, communicator_bytes, update_bytes
from shardwise.planner.compute import amount_bytes, product_weights, rank_parameters, rank_tokens
from shardwise.planner.data import dense_and_expert
from shardwise.planner.halves import stage_waiting_bytes
from shardwise.planner.host import Freed, heap_bytes, heap_of_blocks, heap_of_head, heap_of_others
from shardwise.planner.layout import Layout, Work
from shardwise.planner.parts import ENDS, Placed
from shardwise.planner.simulate import peak_bytes
from shardwise.planner.state import STATE, gathered_bytes, gradients_apart, state_terms
from shardwise.spec.block import Amount, PartCosts, RecomputeLevel
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.schedule import Action

SLACK = 0.06  # of what comes and goes: what the allocator keeps in pieces too small to use
_MOMENT_BYTES = 8.0  # of a weight: Adam's two, in fp32


def rank_memory(
    stages: Sequence[Sequence[Placed]], actions: Sequence[Action], layout: Layout, work: Work, cluster: ClusterSpec
) -> dict[str, float]:
    """Bytes of a rank that holds ``stages`` and runs ``actions``."""
    parts = [placed for stage in stages for placed in stage]
    terms = state_terms(parts, layout, work)
    blocks: dict[int, float] = {}
    logits: dict[int, float] = {}
    masks: dict[int, float] = {}
    for stage, placed in zip(sorted({action.stage for action in actions}), stages, strict=True):
        heads = [one for one in placed if one[0].name == "head"]
        rest = [one for one in placed if one[0].name != "head"]
        blocks[stage], logits[stage] = _saved(rest, layout, work), _saved(heads, layout, work)
        masks[stage] = float(sum(times * _kept_mask(part, level, layout, work) for part, times, level in rest))
    size = max(blocks) + 1
    both = [blocks.get(s, 0.0) + logits.get(s, 0.0) for s in range(size)]
    alone = [blocks.get(s, 0.0) for s in range(size)]
    waiting = [0.0] * size
    if layout.schedule == "zero_bubble":
        waiting[-1] = stage_waiting_bytes(parts, layout, work)
    terms["activations"] = peak_bytes(actions, alone, waiting)
    all_ends = peak_bytes(actions, both, waiting) if any(logits.values()) else terms["activations"]
    terms["logits"] = all_ends - terms["activations"]
    kinds = list({(id(one[0]), one[2]): one for one in parts}.values())  # each once, however often the rank has it
    terms["workspace"] = max(float(workspace_bytes(part, level, layout, work)) for part, _, level in kinds)
    terms["gathered"] = _gathered(kinds, layout, work) + bucket_bytes(parts, layout, work)
    if layout.zero and work.ours:
        # The ends are summed last, when nothing of the passes is left: a copy of their gradients, which themselves are
        # freed before gloo makes another one.
        ends = sum(dense_and_expert([one for one in parts if one[0].name in ENDS], layout, trainable=True))
        passing = sum(terms[name] for name in ("activations", "logits", "workspace", "gathered"))
        terms["gathered"] += max(float(ends) * work.sent_gradient_bytes - passing, 0.0)
    if gradients_apart(layout, work):
        terms = _larger(terms, ("gradients",), ("activations", "logits"))
    if work.kept_bytes:
        terms["kept"] = work.kept_bytes
    if work.counted == "first step":
        terms = _first_step(terms, update_bytes(parts, layout, work), work)
    elif work.counted == "process":
        has_head = any(placed[0].name == "head" for placed in parts)
        terms["heap"] = heap_bytes(terms, layout, _freed(parts, max(alone), layout, work), has_head)
    elif work.counted != "tensors":
        terms["slack"] = SLACK * (terms["activations"] + terms["logits"] + terms["workspace"])
    terms |= _of_device(layout, work, cluster)
    if work.packed:
        bare = [alone[s] - masks.get(s, 0.0) for s in range(size)]
        terms["masks"] = min(
            terms["activations"], peak_bytes(actions, alone, waiting) - peak_bytes(actions, bare, waiting)
        )
        terms["activations"] -= terms["masks"]
    return {name: float(value) for name, value in terms.items()}


def _of_device(layout: Layout, work: Work, cluster: ClusterSpec) -> dict[str, Any]:
    """What is there before a model is, where the figure counts it."""
    if work.counted == "device":
        return {"base": work.base_bytes, "communicators": communicator_bytes(layout, cluster)}
    return {"base": work.base_bytes} if work.counted == "process" else {}


def _first_step(terms: dict[str, Any], copy_bytes: float, work: Work) -> dict[str, Any]:
    """The larger of two moments of a run's first step: in the passes no moments are there yet, in the update that
    makes them nothing of the passes is left.

    Args:
        copy_bytes: that the update takes on top.
    """
    moments = min(_MOMENT_BYTES / work.optimizer_bytes, 1.0) if work.optimizer_bytes else 0.0
    passing = terms | {"optimizer": terms["optimizer"] * (1 - moments)}
    updating = {name: size if name in (*STATE, "kept") else 0.0 for name, size in terms.items()}
    updating["workspace"] = copy_bytes
    return max(passing, updating, key=lambda one: sum(one.values()))


def block_heap_bytes(part: PartCosts, level: RecomputeLevel, layout: Layout, work: Work) -> Any:
    """What one block adds to the heap of a CPU process; of what stands around the blocks, its gradients."""
    if work.counted != "process":
        return 0.0
    placed = [(part, 1, level)]
    gradients = state_terms(placed, layout, work)["gradients"]
    if part.name in ENDS:
        return heap_of_blocks(layout, gradients, Freed(0.0)) + (heap_of_head(layout) if part.name == "head" else 0.0)
    held, trained = (
        sum(dense_and_expert(placed, layout, trainable)) * work.sent_weight_bytes for trainable in (False, True)
    )
    freed = Freed(saved_bytes(part, level, layout, work), held, held, trained, trained)
    return heap_of_blocks(layout, gradients, freed)


def other_heap_bytes(num_bytes: Any, layout: Layout, work: Work) -> Any:
    """What logits and workspace, and the traffic of tensor ranks, add to the heap of a CPU process."""
    return heap_of_others(layout, num_bytes) if work.counted == "process" else 0.0


def slack_share(work: Work) -> float:
    """Of what is kept of a micro-batch, how much more the allocator of a device keeps."""
    return 0.0 if work.counted == "process" else SLACK


def _freed(parts: Sequence[Placed], pass_bytes: float, layout: Layout, work: Work) -> Freed:
    """What comes and goes in a step, for the heap of a process to keep pieces of."""
    blocks = [one for one in parts if one[0].name not in ENDS]
    sizes = []
    for trainable in (False, True):
        held = [float(sum(dense_and_expert([one], layout, trainable))) * work.sent_weight_bytes for one in blocks]
        sizes += [max((size / one[1] for size, one in zip(held, blocks, strict=True)), default=0.0), sum(held)]
    return Freed(pass_bytes, *sizes)


def _larger(terms: dict[str, Any], some: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """The terms without those of two groups that are less."""
    less = min(some, others, key=lambda names: sum(terms[name] for name in names))
    return {name: 0.0 if name in less else size for name, size in terms.items()}


def _saved(parts: Sequence[Placed], layout: Layout, work: Work) -> float:
    return float(sum(times * saved_bytes(part, level, layout, work) for part, times, level in parts))


def saved_bytes(part: PartCosts, level: RecomputeLevel, layout: Layout, work: Work) -> Any:
    """What a part keeps of a micro-batch from its forward to its backward pass."""
    kept = amount_bytes(part.saved.get(level, Amount()), layout, work)
    if part.name == "head" and work.ours:
        # The logits, which autograd does not keep: the loss reads them, or the pipeline holds them as its result.
        elements = sum(product.outer * product.uses for product in part.products)
        kept = kept + rank_tokens(layout, work) * elements / layout.tp * work.compute_bytes
    return kept + _kept_mask(part, level, layout, work)


def _kept_mask(part: PartCosts, level: RecomputeLevel, layout: Layout, work: Work) -> Any:
    return 0.0 if level == "full" else _mask_bytes(part, layout, work)


def _mask_bytes(part: PartCosts, layout: Layout, work: Work) -> Any:
    """Of the mask between packed rows [rows, length, length], which attention makes one of numbers of its own."""
    if not work.packed or part.attention is None:
        return 0.0
    return rank_tokens(layout, work) * work.sequence * work.compute_bytes


def workspace_bytes(part: PartCosts, level: RecomputeLevel, layout: Layout, work: Work) -> Any:
    """What is alive only while one part runs backward: what it computes again, and gradients of the same size."""
    everything = amount_bytes(part.saved.get("none", Amount()), layout, work)
    kept = amount_bytes(part.saved.get(level, Amount()), layout, work)
    bytes_ = everything - kept + (0.0 if part.name == "head" else 0.5 * everything)
    if level == "full":
        bytes_ = bytes_ + _mask_bytes(part, layout, work)
    if not work.ours:
        return bytes_
    return bytes_ + fresh_bytes(part, layout, work)


def fresh_bytes(part: PartCosts, layout: Layout, work: Work) -> Any:
    """Of one weight at a time the gradient of a micro-batch, before it is added to the step's."""
    fresh: Any = 0.0
    for product in part.products:
        if product.trainable:
            fresh = largest(fresh, product_weights(product, layout))
    if part.name == "embedding":  # a lookup's gradient is as large as its table
        fresh = largest(fresh, rank_parameters(part.trainable, part, layout))
    return fresh * work.compute_bytes


def _gathered(parts: Sequence[Placed], layout: Layout, work: Work) -> float:
    """Bytes of what comes and goes with the traffic of the data ranks."""
    if not layout.zero:
        return 0.0
    blocks, trained, ends = [], [], 0.0
    for part, _, level in parts:
        size = sum(dense_and_expert([(part, 1, level)], layout, trainable=False))
        if part.name in ENDS:
            ends = ends + size if work.ours else max(ends, size)
        else:
            blocks.append(size)
            trained.append(sum(dense_and_expert([(part, 1, level)], layout, trainable=True)))
    return float(gathered_bytes(blocks, trained, ends, layout, work))
