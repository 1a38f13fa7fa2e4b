"""One configuration to judge: how a job is split, and what it computes with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shardwise.spec.block import RecomputeLevel


@dataclass(frozen=True)
class Layout:
    """Degrees of a split. Numbers that are marked so may be numpy arrays of candidates, one entry each.

    Args:
        dp: (array) data ranks; ``cp`` (array) ranks that share the sequence of a row; ``ep`` (array) ranks that share
            the experts, out of dp x cp (x tp where experts are not cut by the tensor ranks).
        pp: (array) pipeline ranks, each with ``virtual_stages`` (array) stages.
        zero: what the data and context ranks share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.
        shard: (array) ranks that share it out; the others repeat.
        micro_batch: (array) rows of a forward pass on one data rank, ``num_micro_batches`` (array) of them a step.
        stages: blocks of each stage, stage s on pipeline rank s % pp.
        recompute: level of the first ``recomputed`` blocks of each stage; the others keep everything.
        expert_tensor: experts are cut by the tensor ranks like the rest.
        folded: a pipeline that turns round: rank r holds the r-th stage from the front and the r-th from the back, so
            the first rank has both ends of the model.
    """

    tp: int = 1
    pp: Any = 1
    dp: Any = 1
    cp: Any = 1
    ep: Any = 1
    shard: Any = 1
    zero: int = 0
    micro_batch: Any = 1
    num_micro_batches: Any = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual_stages: Any = 1
    stages: tuple[int, ...] = ()
    recompute: RecomputeLevel = "none"
    recomputed: tuple[int, ...] = ()
    expert_tensor: bool = True
    ring_attention: bool = True
    folded: bool = False

    @property
    def data_ranks(self) -> Any:
        """Ranks over which a gradient of the dense part is summed."""
        return self.dp * self.cp

    @property
    def expert_data_ranks(self) -> Any:
        """Ranks over which a gradient of an expert is summed."""
        both = self.dp * self.cp
        return both / self.ep if self.expert_tensor else both * self.tp / self.ep

    def stages_of(self, pp_rank: int) -> range:
        """The stages of one pipeline rank, in the order of the model."""
        return range(pp_rank, self.pp * self.virtual_stages, self.pp)


@dataclass(frozen=True)
class HostWork:
    """What the host does around kernels where nothing runs beside it, in times of the chip's least operator.

    Args:
        product: of a matrix product inside a step, in times of what it takes alone.
        mapped: of a byte of memory that the system maps anew, in times of writing it.
        collective: of a collective of the tensor ranks, beside its traffic.
        gather: of gathering the weights of one unit of FSDP2, ``reduction`` of summing its gradients.
        stage_pass: of one pass of a pipeline stage, forward or backward: what it is sent, and what it sends.
        deferred: of one weight whose gradient comes in the second half of a backward pass.
    """

    product: float = 1.0
    mapped: float = 0.0
    collective: float = 0.0
    gather: float = 0.0
    reduction: float = 0.0
    stage_pass: float = 0.0
    deferred: float = 0.0


@dataclass(frozen=True)
class Work:
    """What is computed in which precision, and how the software goes about it.

    Args:
        sequence: tokens of a row.
        precision: of products (``bf16``); ``compute_bytes`` of an element.
        weight_bytes: of a weight as it is kept for the forward pass; ``gradient_bytes`` of an accumulated gradient;
            ``optimizer_bytes`` of a weight's masters and optimizer state together.
        sent_weight_bytes: of an element of a gathered weight; ``sent_gradient_bytes`` of a gradient.
        traffic_bytes: memory traffic of the optimizer for each weight.
        accumulation_bytes: memory traffic of adding a weight's gradient to the sum of the step, each micro-batch.
        overlap_data: gradient sums and gathers of weights run beside compute.
        overlap_tensor: share of the tensor collectives' time that fused kernels hide.
        overlap_context: the exchange of keys and values runs beside attention.
        recompute_sends: full recomputation repeats the tensor collectives.
        expert_traffic: factor on the memory traffic that goes with tokens to their experts (how they are sorted).
        expert_operators: kernels that are started for each expert of a rank; 0 where one kernel takes all.
        counted: what a figure of memory counts: what tensors hold, also what the allocator keeps, all that the
            device has given away, or a CPU process above its imports (:mod:`shardwise.planner.host`); ``first step``:
            what tensors hold in one step, whose update makes the moments.
        base_bytes: of a device before the model: context, kernels, libraries' workspaces.
        kept_bytes: of a rank, what it makes in its first step and keeps, beside the model (a bias of attention).
        bucket_elements: of gradients that are copied into one buffer to be summed; 0: they are summed where they are.
        copies_update: an update makes a tensor in fp32 of the size of the weight that it updates.
        host_bytes: of each weight that a rank updates, moved to the host's memory and back once a step.
        ours: it runs on our runtime, which shares out by FSDP2 (:mod:`shardwise.planner.state`), sums gradients once a
            step, and keeps logits beside the scores of the loss.
        packed: rows lie one behind the other, and each block's attention keeps a mask.
        host: what Python takes (:mod:`shardwise.planner.host`).
    """

    sequence: int
    precision: str = "bf16"
    compute_bytes: float = 2.0
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    sent_weight_bytes: float = 2.0
    sent_gradient_bytes: float = 4.0
    traffic_bytes: float = 34.0
    accumulation_bytes: float = 8.0
    overlap_data: bool = True
    overlap_tensor: float = 0.0
    overlap_context: bool = True
    recompute_sends: bool = True
    expert_traffic: float = 1.0
    expert_operators: float = 0.0
    counted: Literal["tensors", "first step", "allocator", "device", "process"] = "device"
    base_bytes: float = 1.3 * 2**30
    kept_bytes: float = 0.0
    bucket_elements: float = 0.0
    copies_update: bool = False
    host_bytes: float = 0.0
    ours: bool = False
    packed: bool = False
    host: HostWork = field(default_factory=HostWork)
