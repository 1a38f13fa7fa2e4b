"""What models cost on our own runtime: traced beforehand for well-known names, and extended to more tensor degrees.

Costs are those of the model's own modules, seen operator by operator on fake tensors. Costs from sizes alone
(:mod:`shardwise.planner.shape`) describe the fused kernels of other people's software.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import ConfigError
from shardwise.spec.block import ModelCosts, PartCosts, TensorSplit
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset_model, preset_names
from shardwise.spec.strategy import legal_tensor_degrees

_MOST_TENSOR_RANKS = 128


def known_models() -> list[str]:
    """Names that need no folder."""
    return preset_names()


def known_costs(name: str) -> tuple[ModelSpec, ModelCosts]:
    """Sizes and costs of a well-known model.

    Raises:
        ConfigError: there is none of this name.
    """
    model, costs = preset_model(name)
    # There is no file of it: a plan is for every model of these sizes.
    return replace(model, has_weights=False, hash=""), with_degrees(costs, model)


def known_within(model: str, costs: ModelCosts, share: float) -> ModelCosts:
    """The costs under the tables that move least of those described within a share (``strategy.tp_whole``).

    Raises:
        ConfigError: none of them is within it.
    """
    found = [one.whole for one in costs.tables if one.whole <= share]
    if not found:
        known = ["its first tables", *(f"those of {one.whole:g}" for one in costs.tables)]
        rule = f"the well-known {model} was described with {', '.join(known)}"
        least = f"Use strategy.tp_whole={costs.tables[0].whole:g}, or leave it out" if costs.tables else "Leave it out"
        raise ConfigError(f"strategy.tp_whole = {share:g}", rule, least)
    return costs.under(max(found))


def with_degrees(costs: ModelCosts, model: ModelSpec) -> ModelCosts:
    """The costs with every tensor degree that the model's numbers allow, not only those that were traced.

    What is sent for a token does not depend on the degree, and what cannot be cut at one stays whole at its multiples.
    """
    legal = legal_tensor_degrees(model) if model.num_heads else []
    degrees = [degree for degree in legal if degree <= _MOST_TENSOR_RANKS]

    def part(one: PartCosts) -> PartCosts:
        known = {split.degree: split for split in one.degrees}
        more = [_like(known, degree, degrees) for degree in degrees if degree not in known]
        return replace(one, degrees=tuple(sorted((*one.degrees, *more), key=lambda split: split.degree)))

    return costs.map_parts(part)


def _like(known: dict[int, TensorSplit], degree: int, by_numbers: list[int]) -> TensorSplit:
    """The split at a degree that nobody looked at, from those at others."""
    legal = [split for split in known.values() if split.degree > 1 and not split.rule]
    # The largest that divides it, else the largest below it, else the smallest.
    if legal:
        below = [split for split in legal if split.degree < degree]
        dividing = [split for split in below if degree % split.degree == 0]
        nearest = (dividing or below)[-1] if below else legal[0]
        return replace(nearest, degree=degree)
    refused = [split for split in known.values() if split.rule and split.degree in by_numbers]
    return TensorSplit(degree, refused[0].rule if refused else "was not described: no degree above 1 was looked at")
