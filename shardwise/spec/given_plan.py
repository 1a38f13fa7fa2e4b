"""``strategy.plan``: a saved plan in the place of the other keys of a strategy. Imports no torch."""

from __future__ import annotations

from typing import Any

from shardwise.errors import PlanError
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig

_OPTIONS = ("gradient_aggregation_group", "sequence_parallel", "tp_whole")
_SIZES = ("num_blocks", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size", "num_experts")


def with_given_plan(run: RunConfig, model: ModelSpec) -> tuple[RunConfig, dict[str, Any] | None]:
    """``run`` with what the plan that it names says, and that plan's sharding table; unchanged where it names none.

    Raises:
        PlanError: the plan cannot be read, is damaged or for another model, or a key says something else.
    """
    if run.strategy.plan is None:
        return run, None
    plan = Plan.load(run.strategy.plan)
    if not plan.model.hash:
        _check_sizes(plan.model, model, run.strategy.plan)
    elif plan.model.hash != model.hash:
        rule = f"is for another model ({plan.model.architecture} of hash {plan.model.hash[:16]}, not {model.hash[:16]})"
        raise PlanError(f"strategy.plan = {run.strategy.plan!r}", rule, "Make the plan again for this model")
    return _with_plan(run, plan), plan.table


def _check_sizes(planned: ModelSpec, model: ModelSpec, path: str) -> None:
    """A plan for a well-known name is for every model of its sizes."""
    for name in _SIZES:
        mine, wanted = getattr(model, name), getattr(planned, name)
        if mine != wanted:
            rule = f"is for a model with {name} = {wanted}, and this one has {mine}"
            raise PlanError(f"strategy.plan = {path!r}", rule, "Make the plan again for this model")


def _with_plan(run: RunConfig, plan: Plan) -> RunConfig:
    """``run`` with the strategy of ``plan`` in its keys, and its batch where the run names none.

    Raises:
        PlanError: a key that is given beside the plan says something else.
    """
    expected = _as_keys(plan)
    for name in sorted(run.strategy.model_fields_set - {"plan"}):
        given = getattr(run.strategy, name)
        free = name == "gradient_aggregation_group" and expected[name] is None  # a matter of traffic, not of the split
        if given is not None and given != expected[name] and not free:
            rule = f"the plan in strategy.plan says {expected[name]}"
            raise PlanError(f"strategy.{name} = {given}", rule, f"Leave out strategy.{name}, or strategy.plan")
    update: dict[str, Any] = {name: value for name, value in expected.items() if name not in ("dp", "cp", "ep")}
    if plan.strategy.gradient_aggregation_group is None:
        update.pop("gradient_aggregation_group")
    train = run.train
    if train.global_batch_size is None and train.gradient_accumulation_steps is None:
        train = train.model_copy(update={"global_batch_size": plan.global_batch_size})
    return run.model_copy(update={"strategy": run.strategy.model_copy(update=update), "train": train})


def _as_keys(plan: Plan) -> dict[str, Any]:
    """The plan's strategy by the names of run.yaml."""
    strategy = plan.strategy
    same = ("pp", "tp", "dp_replicate", "dp_shard", "reshard", "schedule", "micro_batch_size", "stages")
    keys = {name: getattr(strategy, name) for name in (*same, *_OPTIONS)}
    recompute = {-1: "full", 0: "none"}.get(strategy.recompute, strategy.recompute)
    virtual = strategy.virtual_stages
    return keys | {"recompute": recompute, "virtual_stages": virtual, "dp": strategy.dp, "cp": 1, "ep": 1}
