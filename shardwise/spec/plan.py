"""The plan: the only bridge between planning and running. Frozen, saved as ``plan.json``, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

from shardwise.errors import PlanError
from shardwise.files import replace_text
from shardwise.spec.cluster import DeviceType
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import AXES, ScheduleName, Strategy, legal_tensor_degrees

SCHEMA = 1
_FP32_BYTES = 4


@dataclass(frozen=True)
class Plan:
    """What runs: a model, its split over ``devices`` processes, and the rows of an optimizer step.

    ``table`` is the sharding table as JSON, None where the workers derive it from the model. ``predicted`` is what the
    planner expects of it (``step_seconds``, ``memory_bytes`` of the fullest process), None where it was not asked.
    """

    model: ModelSpec
    strategy: Strategy
    global_batch_size: int
    device_type: DeviceType
    table: dict[str, Any] | None = None
    schema: int = SCHEMA
    predicted: dict[str, float] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Refuse what no rank could execute, also in a plan that was edited by hand.

        Raises:
            PlanError: an illegal tensor degree, a schedule that does not fit the stages, stages that do not
                hold every block once, or a batch that does not divide.
        """
        legal = legal_tensor_degrees(self.model)
        if self.strategy.tp not in legal:
            rule = f"legal degrees: {', '.join(map(str, legal))}"
            raise PlanError(f"plan with tp = {self.strategy.tp}", rule, "Make the plan again")
        if self.strategy.sequence_parallel and self.strategy.tp == 1:
            rule = "cuts the sequence over the tensor ranks, and tp is 1"
            raise PlanError("plan with sequence_parallel = true", rule, "Make the plan again")
        share = self.strategy.tp_whole
        if share is not None and (self.strategy.tp == 1 or not 0 <= share <= 1):
            rule = f"must be a share from 0 to 1 with tp above 1, or null (tp is {self.strategy.tp})"
            raise PlanError(f"plan with tp_whole = {share}", rule, "Make the plan again")
        _check_stages(self.strategy, self.model.num_blocks)
        rows = self.global_batch_size
        groups = self.strategy.gradient_aggregation_group
        if groups is not None and groups < 1:
            value = f"plan with gradient_aggregation_group = {groups}"
            raise PlanError(value, "must be above 0 or null", "Make the plan again")
        unit = self.strategy.dp * self.strategy.micro_batch_size
        if rows < 1 or rows % unit:
            rule = f"must be a multiple of {unit} (data ranks x rows of a micro-batch)"
            raise PlanError(f"plan with a global batch of {rows} rows", rule, "Make the plan again")

    @property
    def devices(self) -> int:
        """Number of processes, one a device."""
        return self.strategy.world_size

    @property
    def num_micro_batches(self) -> int:
        """M of a full step on one data rank."""
        return self.strategy.num_micro_batches(self.global_batch_size)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "model": self.model.to_json(),
            "strategy": self.strategy.to_json(),
            "global_batch_size": self.global_batch_size,
            "device_type": self.device_type,
            "devices": self.devices,
            "table": self.table,
            "predicted": self.predicted,
        }

    @classmethod
    def from_json(cls, data: Any, source: str = "plan") -> Plan:
        """The inverse of :meth:`to_json`; ``source`` names the file in messages.

        Raises:
            PlanError: not a plan, one of another schema, or one whose parts do not fit each other.
        """
        if not isinstance(data, dict) or "schema" not in data:
            raise PlanError(source, "is not a plan of Shardwise", "Give a plan.json that `shardwise` wrote")
        if data["schema"] != SCHEMA:
            raise PlanError(
                source, f"has schema {data['schema']!r}, this version reads {SCHEMA}", "Make the plan again"
            )
        try:
            plan = cls(
                model=ModelSpec.from_json(data["model"]),
                strategy=Strategy.from_json(data["strategy"]),
                global_batch_size=data["global_batch_size"],
                device_type=data["device_type"],
                table=data["table"],
                predicted=data.get("predicted"),
            )
            devices = data["devices"]
        except KeyError as error:
            raise PlanError(source, f"has no {error.args[0]!r}", "Make the plan again") from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise PlanError(source, f"is damaged ({error})", "Make the plan again") from None
        if devices != plan.devices:
            rule = f"is for {devices} devices, and its strategy ({plan.strategy}) for {plan.devices}"
            raise PlanError(source, rule, "Correct one of them")
        if plan.device_type not in get_args(DeviceType):
            raise PlanError(f"{source}: device_type = {plan.device_type!r}", "must be cpu, cuda or npu", "Correct it")
        return plan

    def save(self, path: str | Path) -> None:
        replace_text(Path(path), json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that :meth:`save` wrote.

        Raises:
            PlanError: no such file, no JSON, or what :meth:`from_json` refuses.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"plan {path}", f"cannot be read ({error.strerror})", "Give the path of a plan") from None
        except (ValueError, RecursionError) as error:
            raise PlanError(f"plan {path}", f"is not JSON ({error})", "Make the plan again") from None
        return cls.from_json(data, f"plan {path}")


def _check_stages(strategy: Strategy, num_blocks: int) -> None:
    schedule, virtual, stages = strategy.schedule, strategy.virtual_stages, strategy.stages
    if schedule not in get_args(ScheduleName):
        rule = f"must be one of {', '.join(get_args(ScheduleName))}"
        raise PlanError(f"plan with schedule {schedule!r}", rule, "Make the plan again")
    if virtual < 1 or (schedule == "interleaved") != (virtual > 1) or (virtual > 1 and strategy.pp < 2):
        rule = f"a rank has several stages under the schedule interleaved and pp above 1 alone (pp is {strategy.pp})"
        value = f"plan with schedule {schedule} and virtual_stages = {virtual}"
        raise PlanError(value, rule, "Make the plan again")
    if schedule == "zero_bubble" and strategy.pp < 2:
        rule = "puts off gradients of weights to where a pipeline would wait"
        raise PlanError(f"plan with schedule {schedule} and pp = {strategy.pp}", rule, "Make the plan again")
    if len(stages) != strategy.num_stages or sum(stages) != num_blocks or min(stages) < 1:
        rule = f"must be {strategy.num_stages} numbers above 0 that sum to the model's {num_blocks} blocks"
        raise PlanError(f"plan with stages {list(stages)}", rule, "Make the plan again")


@dataclass(frozen=True)
class RankShare:
    """What one process holds. ``blocks`` are half-open ranges of block indices, one for each of its stages.

    ``parameter_bytes`` is an estimate for fp32: norms whole, everything else split evenly.
    """

    rank: int
    coordinates: dict[str, int]
    blocks: tuple[tuple[int, int], ...]
    embedding: bool
    head: bool
    tensor_part: int
    shard_part: int
    parameter_bytes: int

    def __str__(self) -> str:
        blocks = " and ".join(f"{first}..{end - 1}" for first, end in self.blocks)
        parts = ["embedding"] * self.embedding + [f"blocks {blocks}"] + ["head"] * self.head
        shares = [f"1/{n} by {axis}" for n, axis in ((self.tensor_part, "tp"), (self.shard_part, "dp_shard")) if n > 1]
        return " + ".join(parts) + (f", {' and '.join(shares)}" if shares else "")


def batch_equation(plan: Plan) -> str:
    """``global batch 8 rows = 2 data ranks x 2 rows x 2 micro-batches``."""
    factors = (
        _counted(plan.strategy.dp, "data rank"),
        _counted(plan.strategy.micro_batch_size, "row"),
        _counted(plan.num_micro_batches, "micro-batch", "es"),
    )
    return f"global batch {_counted(plan.global_batch_size, 'row')} = {' x '.join(factors)}"


def ranks(plan: Plan, most: int | None = None) -> list[RankShare]:
    """What each process holds, or each of the first ``most``, by global rank; the tensor axis varies fastest."""
    ends = list(accumulate(plan.strategy.stages))
    number = plan.devices if most is None else min(most, plan.devices)
    return [_share(plan, rank, _coordinates(plan.strategy, rank), ends) for rank in range(number)]


def _coordinates(strategy: Strategy, rank: int) -> dict[str, int]:
    places = {}
    for axis in reversed(AXES):
        rank, places[axis] = divmod(rank, getattr(strategy, axis))
    return {axis: places[axis] for axis in AXES}


def _share(plan: Plan, rank: int, coordinates: dict[str, int], ends: list[int]) -> RankShare:
    strategy, model, place = plan.strategy, plan.model, coordinates["pp"]
    embedding, head = place == 0, place == strategy.pp - 1
    blocks = tuple((ends[stage] - strategy.stages[stage], ends[stage]) for stage in strategy.stages_of(place))
    num_blocks = sum(end - first for first, end in blocks)
    norms = (
        num_blocks * model.block_norm_parameters + model.before_parameters * embedding + model.after_parameters * head
    )
    split = num_blocks * (model.block_parameters - model.block_norm_parameters)
    num_ends = 1 if model.tied and embedding and head else embedding + head
    split += num_ends * model.embedding_parameters
    parameters = (norms + split / strategy.tp) / strategy.dp_shard
    return RankShare(
        rank=rank,
        coordinates=coordinates,
        blocks=blocks,
        embedding=embedding,
        head=head,
        tensor_part=strategy.tp,
        shard_part=strategy.dp_shard,
        parameter_bytes=round(parameters * _FP32_BYTES),
    )


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
