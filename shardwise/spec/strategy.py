"""The split of a job over its devices, and the arithmetic of its batch. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

from shardwise.config import nearest_multiples
from shardwise.errors import PlanError
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunConfig, StrategyConfig

DEFAULT_GLOBAL_BATCH_SIZE = 8
DEFAULT_VIRTUAL_STAGES = 2
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
AXES = ("pp", "dp_replicate", "dp_shard", "tp")  # mesh order: tensor parallel on neighbouring ranks


@dataclass(frozen=True)
class Strategy:
    """Degrees of every axis, and how a step runs on them.

    ``stages`` holds the number of blocks of each pipeline stage (sum: all blocks of the model). Stage s is on
    pipeline rank s % ``pp``, which holds ``virtual_stages`` of them (1, but for the schedule ``interleaved``);
    ``recompute`` the number of blocks of each stage, from its first, whose activations are
    recomputed in the backward pass (-1: all). ``gradient_aggregation_group`` is the number of buckets in
    which gradients are summed over the data ranks (None: a block each with dp_shard, else 25 MiB each).
    ``sequence_parallel``: between blocks and in norms a tensor rank holds its part of the sequence alone.
    ``tp_whole``: the share of the blocks' weights that may stay whole on every tensor rank, for less traffic (None:
    as little as can be).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    reshard: bool = True
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    micro_batch_size: int = 1
    recompute: int = 0
    stages: tuple[int, ...] = ()
    gradient_aggregation_group: int | None = None
    sequence_parallel: bool = False
    tp_whole: float | None = None

    @property
    def dp(self) -> int:
        """Number of data ranks: groups of devices that see different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    def stages_of(self, pp_rank: int) -> range:
        """The stages of one pipeline rank, in the order of the model."""
        return range(pp_rank, self.num_stages, self.pp)

    def num_micro_batches(self, global_batch_size: int) -> int:
        """M = G / (dp m); exact, since :func:`resolve` refuses a remainder."""
        return global_batch_size // (self.dp * self.micro_batch_size)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"stages": list(self.stages)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Strategy:
        return cls(**(data | {"stages": tuple(data["stages"])}))

    def __str__(self) -> str:
        degrees = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(degrees) or "one device"


def legal_tensor_degrees(model: ModelSpec) -> list[int]:
    """Every tensor degree that gives each rank whole heads and a part of the vocabulary, and each KV head whole
    ranks."""
    most = min(model.intermediate_size, model.vocab_size)
    if not model.num_heads:  # whether their other parts can be cut the workers find out
        return [tp for tp in range(1, most + 1) if not _leaves_a_rank_empty(model.vocab_size, tp)]
    heads, kv_heads = model.num_heads, model.num_kv_heads
    most = min(heads, most)
    return [
        tp
        for tp in range(1, most + 1)
        if heads % tp == 0
        and (kv_heads % tp == 0 or tp % kv_heads == 0)
        and not _leaves_a_rank_empty(model.vocab_size, tp)
    ]


def _leaves_a_rank_empty(size: int, parts: int) -> bool:
    """Whether a cut as torch.chunk makes it leaves the last part without an element: 5 over 4 is 2, 2, 1, 0."""
    return (parts - 1) * -(-size // parts) >= size


def default_stages(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage, as even as possible; the last, which also holds the head, never has more.

    ``(7, 2) -> (4, 3)``, ``(10, 3) -> (4, 3, 3)``.
    """
    base, extra = divmod(num_blocks, num_stages)
    return tuple(base + (stage < extra) for stage in range(num_stages))


def resolve(run: RunConfig, model: ModelSpec, local_devices: int) -> tuple[Strategy, int]:
    """The strategy and the global batch G (rows) of a run: given fields are fixed, missing ones filled.

    A missing tp or pp is 1; what then remains of ``devices`` is data parallel. A missing ``devices`` is
    the product of the degrees where all are given or only one device is at hand, else ``local_devices``.

    Raises:
        PlanError: the model, the devices or the batch cannot be split so; the message names what can.
    """
    given = run.strategy
    if run.train.compile and model.num_experts:
        rule = f"the loop over the {model.num_experts} experts of a block does not compile"
        raise PlanError("train.compile = true", rule, "Use train.compile=false")
    if run.train.compile and given.schedule == "zero_bubble":
        rule = "a compiled block computes the gradients of its inputs and of its weights in one go"
        remedy = "Use strategy.schedule=1f1b, or train.compile=false"
        raise PlanError("train.compile = true with strategy.schedule = zero_bubble", rule, remedy)
    tp = _tensor_degree(given.tp, model)
    pp, stages = _pipeline_stages(given, model.num_blocks)
    replicate, shard = _data_degrees(run, pp * tp, local_devices)
    rows, micro_batch_size = _batch(run, pp, replicate * shard)
    strategy = Strategy(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        tp=tp,
        reshard=pp == 1 if given.reshard is None else given.reshard,
        schedule=given.schedule,
        virtual_stages=len(stages) // pp,
        micro_batch_size=micro_batch_size,
        recompute=_recompute(given.recompute, stages),
        stages=stages,
        gradient_aggregation_group=given.gradient_aggregation_group,
        sequence_parallel=_sequence_parallel(run, tp, model),
        tp_whole=given.tp_whole,
    )
    return strategy, rows


def _tensor_degree(given: int | None, model: ModelSpec) -> int:
    tp, legal = given or 1, legal_tensor_degrees(model)
    if tp in legal:
        return tp
    if model.num_heads and model.num_heads % tp:
        rule = f"does not divide the {model.num_heads} attention heads"
    elif model.num_heads and model.num_kv_heads % tp and tp % model.num_kv_heads:
        rule = f"neither divides the {model.num_kv_heads} KV heads nor is a multiple of them"
    else:
        sizes = f"the vocabulary {model.vocab_size} or the FFN width {model.intermediate_size}"
        rule = f"leaves a rank without a part of {sizes}"
    raise PlanError(f"strategy.tp = {tp}", rule, f"legal degrees: {', '.join(map(str, legal))}")


def _sequence_parallel(run: RunConfig, tp: int, model: ModelSpec) -> bool:
    if run.strategy.sequence_parallel and tp == 1:
        rule = "cuts the sequence over the tensor ranks, and strategy.tp is 1"
        legal = [degree for degree in legal_tensor_degrees(model) if degree > 1]
        other = f"Use strategy.tp={legal[0]}, or leave it out" if legal else "Leave it out"
        raise PlanError("strategy.sequence_parallel = true", rule, other)
    return run.strategy.sequence_parallel


def _pipeline_stages(given: StrategyConfig, num_blocks: int) -> tuple[int, tuple[int, ...]]:
    """pp and the blocks of each stage; a rank holds the same number of stages as every other."""
    stages = given.stages
    virtual = _virtual_stages(given)
    pp = given.pp or (max(1, len(stages) // virtual) if stages else 1)
    several = f" with strategy.virtual_stages = {virtual}" if virtual > 1 else ""
    if virtual > 1 and pp == 1:
        rule = "several stages take turns on each rank of a pipeline, and strategy.pp is 1"
        raise PlanError(
            "strategy.schedule = interleaved", rule, "Give strategy.pp=2 or more, or strategy.schedule=1f1b"
        )
    if given.schedule == "zero_bubble" and pp == 1:
        rule = "puts off gradients of weights to where a pipeline would wait, and strategy.pp is 1"
        raise PlanError(
            "strategy.schedule = zero_bubble", rule, "Give strategy.pp=2 or more, or strategy.schedule=1f1b"
        )
    if pp * virtual > num_blocks:
        rule = f"the model has {num_blocks} blocks, and each stage needs one"
        raise PlanError(f"strategy.pp = {pp}{several}", rule, _fewer_stages(pp, virtual, num_blocks))
    if stages is None:
        return pp, default_stages(num_blocks, pp * virtual)
    value, remedy = f"strategy.stages = {list(stages)}", f"For example {list(default_stages(num_blocks, pp * virtual))}"
    if len(stages) != pp * virtual:
        wanted = f"strategy.pp is {pp}" if virtual == 1 else f"strategy.pp x strategy.virtual_stages is {pp * virtual}"
        raise PlanError(value, f"has {len(stages)} entries, and {wanted}", remedy)
    if sum(stages) != num_blocks:
        raise PlanError(value, f"sums to {sum(stages)}, and the model has {num_blocks} blocks", remedy)
    return pp, stages


def _virtual_stages(given: StrategyConfig) -> int:
    """Stages of each pipeline rank; what is missing follows from ``pp`` and ``stages`` where both are given."""
    if given.schedule != "interleaved":
        return 1
    if given.virtual_stages is None and given.pp and given.stages and len(given.stages) >= 2 * given.pp:
        return len(given.stages) // given.pp
    return given.virtual_stages or DEFAULT_VIRTUAL_STAGES


def _fewer_stages(pp: int, virtual: int, num_blocks: int) -> str:
    """What works in place of more stages than blocks."""
    if virtual == 1:
        return f"legal degrees: 1 to {num_blocks}"
    if num_blocks // pp > 1:
        return f"Use strategy.virtual_stages={num_blocks // pp}"
    if num_blocks // virtual > 1:
        return f"Use strategy.pp={num_blocks // virtual}, or strategy.schedule=1f1b without virtual_stages"
    most = min(pp, num_blocks)
    return f"Use strategy.pp={most} with strategy.schedule=1f1b, without virtual_stages"


def _recompute(given: str | int, stages: tuple[int, ...]) -> int:
    """Number of recomputed blocks of a stage, -1 for all of them."""
    if isinstance(given, str):
        assert given in ("none", "full"), "rules.py refuses what is not built yet"
        return -1 if given == "full" else 0
    if given > max(stages):
        rule = f"the largest stage has {max(stages)} blocks (stages {list(stages)})"
        raise PlanError(f"strategy.recompute = {given}", rule, f"Use full, or at most {max(stages)}")
    return given


def _data_degrees(run: RunConfig, model_ranks: int, local_devices: int) -> tuple[int, int]:
    """dp_replicate and dp_shard; ``model_ranks`` = pp x tp devices hold one copy of the model."""
    given = run.strategy
    replicate, shard = _split_dp(given.dp, given.dp_replicate, given.dp_shard)
    product = model_ranks * (replicate or 1) * (shard or 1)
    open_data_axis = replicate is None or shard is None
    devices = run.devices
    if devices is None:
        all_given = None not in (given.pp or given.stages, given.tp, replicate, shard)
        devices = product if all_given or local_devices == 1 else local_devices
    if devices % product or (devices != product and not open_data_axis):
        raise _wrong_product(run, devices, product, open_data_axis)
    rest = devices // product
    if shard is None:
        return replicate or 1, rest
    return (rest, shard) if replicate is None else (replicate, shard)


def _split_dp(dp: int | None, replicate: int | None, shard: int | None) -> tuple[int | None, int | None]:
    """The data axes that ``dp`` settles: all of it is dp_shard where nothing else is said."""
    if dp is None:
        return replicate, shard
    part = (replicate or 1) * (shard or 1)
    if dp % part or (replicate and shard and dp != part):
        names = {"dp_replicate": replicate, "dp_shard": shard}
        shown = ", ".join(f"strategy.{name} = {degree}" for name, degree in names.items() if degree)
        rule = "dp is the product of dp_replicate and dp_shard"
        near = part if replicate and shard else max(part, dp // part * part)
        raise PlanError(f"strategy.dp = {dp}, {shown}", rule, f"Leave dp out, or use dp={near}")
    if shard is None:
        return replicate or 1, dp // part
    return dp // shard, shard


def _wrong_product(run: RunConfig, devices: int, product: int, open_data_axis: bool) -> PlanError:
    degrees = [f"{axis} {getattr(run.strategy, axis)}" for axis in (*AXES, "dp") if getattr(run.strategy, axis)]
    value = f"devices = {devices}, strategy {' x '.join(degrees) or 'one device'}"
    if not open_data_axis:
        return PlanError(value, f"the product of the degrees is {product}", f"Use devices={product}")
    near = " or ".join(f"devices={n}" for n in nearest_multiples(devices, product))
    return PlanError(value, f"the product of the degrees, {product}, does not divide the devices", f"Use {near}")


def _batch(run: RunConfig, pp: int, dp: int) -> tuple[int, int]:
    """G and m: rows of an optimizer step, rows of a forward pass on one data rank."""
    given_m, accumulation, rows = (
        run.strategy.micro_batch_size,
        run.train.gradient_accumulation_steps,
        run.train.global_batch_size,
    )
    unit = dp * (given_m or 1)
    if accumulation is not None:
        assert given_m is not None, "rules.py wants it beside accumulation steps"
        rows = unit * accumulation
    if rows is None:
        rows = -(-DEFAULT_GLOBAL_BATCH_SIZE // unit) * unit
    if rows % unit:
        shown = f"{dp} data rank{'s' if dp > 1 else ''}" + (
            f" x micro_batch_size {given_m} = {unit}" if given_m else ""
        )
        near = " or ".join(map(str, nearest_multiples(rows, unit)))
        raise PlanError(f"train.global_batch_size = {rows}", f"is not divisible by {shown}", f"Use {near}")
    return rows, given_m or _default_micro_batch_size(rows // dp, pp)


def filling_micro_batch_size(device_rows: int, accumulation: int, pp: int) -> int:
    """m where a data rank has ``accumulation`` times ``device_rows`` rows a step, as Hugging Face gives the batch.

    It is ``device_rows``; where that makes fewer micro-batches than stages, of which some would be empty, the
    default for as many rows.
    """
    return device_rows if accumulation >= pp else _default_micro_batch_size(device_rows * accumulation, pp)


def _default_micro_batch_size(rank_rows: int, pp: int) -> int:
    """The largest m that divides a data rank's rows: up to 8, or leaving 2 pp micro-batches to fill the pipeline."""
    most = 8 if pp == 1 else rank_rows // (2 * pp)
    divisors = (m for d in range(1, isqrt(rank_rows) + 1) if rank_rows % d == 0 for m in (d, rank_rows // d))
    return max((m for m in divisors if m <= most), default=1)
