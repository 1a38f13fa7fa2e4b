"""What each split module moves, at ring cost (Patarasuk and Yuan 2009): elements that a rank sends for one token.

An all-reduce of n elements over p ranks moves 2 n (p - 1) / p, a gather or a reduce-scatter half of it. Routing
weights of experts, a few numbers a token, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.tensor.parts import Parts
from shardwise.tensor.table import ModuleSplit, ShardingTable, Style


@dataclass(frozen=True)
class ModuleCost:
    """One split module: ``collectives`` in words, elements that it moves for a token, forward and backward.

    ``whole``: parameters of it that every rank holds.
    """

    module: str
    style: str
    parts: Parts
    collectives: str
    forward: float
    backward: float
    whole: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"parts": [part.size for part in self.parts]}


_WORDS = {
    Style.COLUMN: "",
    Style.ROW: "all-reduce of the output",
    Style.VOCAB_EMBEDDING: "all-reduce of the output",
    Style.VOCAB_HEAD: "",
    Style.COLUMN_GATHER: "all-gather of the output",
    Style.ROW_SPLIT: "all-reduce of the output",
    Style.SUM_OUTPUT: "all-reduce of the output's gradient",
    Style.PARTIAL: "sum of its gradient once a step",
    Style.EXPERTS: "all-reduce of the output and of the input's gradient",
    Style.SLICE: "each rank keeps its positions of the output",
}


def module_costs(model: nn.Module, table: ShardingTable) -> Iterator[ModuleCost]:
    """The modules of ``table`` in the model's order. The gradient of an input that a group shares is paid by its
    first module."""
    ring = (table.degree - 1) / table.degree
    paid: set[str] = set()
    for name, module in model.named_modules():
        split = table.modules.get(name)
        if split is None:
            continue
        pays = bool(split.group) and split.group not in paid
        paid |= {split.group}
        forward, backward = _elements(split, *_features(module, model), pays)
        words = _WORDS[split.style]
        if pays:
            words = "; ".join(filter(None, ["all-reduce of the input's gradient", words]))
        elif split.group and not words:
            words = f"as {split.group.rpartition('.')[2]}: one input, one sum"
        whole = sum(p.numel() for n, p in module.named_parameters(recurse=False) if not table.is_cut(f"{name}.{n}"))
        yield ModuleCost(name, split.style.value, split.parts, words, ring * forward, ring * backward, whole)


def _elements(split: ModuleSplit, inputs: int, outputs: int, pays: bool) -> tuple[float, float]:
    """Elements a token, forward and backward, the factor (p - 1) / p left out."""
    back = 2.0 * inputs if pays else 0.0
    style = split.style
    if style in (Style.ROW, Style.ROW_SPLIT, Style.VOCAB_EMBEDDING):
        return 2.0 * outputs, back
    if style is Style.COLUMN_GATHER:
        return 1.0 * outputs, back + (1.0 * outputs if split.shares else 0.0)
    if style is Style.SUM_OUTPUT:
        return 0.0, 2.0 * outputs
    if style is Style.EXPERTS:
        return 2.0 * outputs, 2.0 * inputs
    return 0.0, back


def _features(module: nn.Module, model: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a module for one token; of a stack of experts the hidden size."""
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return 1, module.embedding_dim
    config: Any = model.config
    hidden = int(config.get_text_config(decoder=True).hidden_size)
    return hidden, hidden
