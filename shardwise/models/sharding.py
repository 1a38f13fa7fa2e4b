"""The sharding table: how each weight-bearing module is split over the tensor axis.

Until the sharding search lands, the table comes from the tensor plan that the model's configuration
class publishes; embedding and head are ours (split over the vocabulary). Whatever fills the table, the
runtime reads only :class:`ShardingTable`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.structure import Structure


class Style(StrEnum):
    """How a module is split, and which collective that costs."""

    COLUMN = "column"  # output features split; all-reduce of the input's gradient, once for a group
    ROW = "row"  # input features split; all-reduce of the output, bias added once
    KV_SLICE = "kv_slice"  # more tensor ranks than key/value heads: whole weight, each rank computes its head
    VOCAB_EMBEDDING = "vocab_embedding"  # rows split; all-reduce of the output
    VOCAB_HEAD = "vocab_head"  # output features split, logits stay split; all-reduce of the input's gradient
    COLUMN_GATHER = "column_gather"  # as column; all-gather of the output, reduce-scatter of its gradient
    ROW_SPLIT = "row_split"  # as row; each rank takes its part of a whole input
    PARTIAL = "partial"  # replicated weight that sees only this rank's heads: gradient summed once a step


_PUBLISHED = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "colwise_gather_output": Style.COLUMN_GATHER,
    "rowwise_split_input": Style.ROW_SPLIT,
    "replicated_with_grad_allreduce": Style.PARTIAL,
}


@dataclass(frozen=True)
class ShardingTable:
    """Module name -> style, for every module that is not simply replicated."""

    degree: int
    styles: Mapping[str, Style]

    def to_json(self) -> dict[str, str]:
        return {name: style.value for name, style in self.styles.items()}


def published_table(model: PreTrainedModel, structure: Structure, degree: int) -> ShardingTable:
    """The table of ``degree`` tensor ranks from ``config.base_model_tp_plan``.

    Raises:
        PlanError: the configuration publishes no plan, or one with a style that is not known here.
    """
    if degree == 1:
        return ShardingTable(1, {})
    config = model.config.get_text_config()
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    refused = f"strategy.tp = {degree}"
    if not any(pattern.rpartition(".")[2] != "embed_tokens" and "*" in pattern for pattern in plan):
        raise PlanError(refused, f"transformers publishes no tensor plan for {type(model).__name__}", "Use tp=1")
    base = structure.blocks.rpartition(".")[0]
    styles: dict[str, Style] = {
        structure.embedding: Style.VOCAB_EMBEDDING,
        structure.head: Style.VOCAB_HEAD,
    }
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for name, module in model.named_modules():
        published = next((s for p, s in plan.items() if fnmatch.fnmatchcase(name, f"{base}.{p}")), None)
        if published is None or name in styles or not any(True for _ in module.parameters(recurse=False)):
            continue
        if published not in _PUBLISHED:
            raise PlanError(refused, f"{name} is to be split as {published!r}, which is not available", "Use tp=1")
        style = _PUBLISHED[published]
        if style is Style.COLUMN and kv_heads % degree and name.rpartition(".")[2] in ("k_proj", "v_proj"):
            style = Style.KV_SLICE
        styles[name] = style
    return ShardingTable(degree, styles | _between_gather_and_split(model, styles))


def _between_gather_and_split(model: PreTrainedModel, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Whole weights beside gathered projections (q/k norms): each rank's gradient is that of its part alone."""
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style is Style.COLUMN_GATHER}
    return {
        name: Style.PARTIAL
        for name, module in model.named_modules()
        if name.rpartition(".")[0] in parents and name not in styles and any(True for _ in module.parameters())
    }
