"""Adapters under the tensor split: each part is cut as its layer is, and joins it before the layer's collective."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import PlanError
from shardwise.models.lora import ADAPTER, has_adapter
from shardwise.tensor.table import ModuleSplit, Style

# Style of a layer -> those of lora_A and lora_B. PARTIAL: whole on every rank, which sees only its share of the
# gradient: A of a column layer gets it through this rank's rows of B, B of a row layer from this rank's A x.
_PARTS = {
    Style.COLUMN: (Style.PARTIAL, Style.COLUMN),
    Style.VOCAB_HEAD: (Style.PARTIAL, Style.COLUMN),
    Style.ROW: (Style.ROW, Style.PARTIAL),
    Style.COLUMN_GATHER: (Style.PARTIAL, Style.COLUMN),
    Style.ROW_SPLIT: (Style.ROW, Style.PARTIAL),
    Style.SLICE: (Style.PARTIAL, Style.PARTIAL),
}


class LowRank:
    """``B (A dropout(x)) alpha / r`` on local weights."""

    def __init__(self, layer: nn.Module) -> None:
        self._dropout, self._a, self._b = layer.lora_dropout, layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        self._scaling: float = layer.scaling[ADAPTER]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(self._dropout[ADAPTER](x), self._a.weight)
        return F.linear(low * self._scaling, self._b.weight)


def pieces(module: nn.Module, split: ModuleSplit) -> list[tuple[nn.Module, ModuleSplit]]:
    """The modules that hold the parameters of a split module, each with its own split.

    Raises:
        PlanError: an adapter on a module whose style it cannot follow.
    """
    if not has_adapter(module):
        return [(module, split)]
    if split.style is Style.SUM_OUTPUT:
        return [(module.base_layer, split)]  # whole, with whole gradients, as its adapter is
    if split.style not in _PARTS:
        rule = f"a layer split as {split.style.value!r} cannot have an adapter under tensor parallel"
        raise PlanError("lora.target_modules", rule, "Use tp=1, or leave it out of lora.target_modules")
    style_a, style_b = _PARTS[split.style]
    return [
        (module.base_layer, split),
        (module.lora_A[ADAPTER], replace(split, style=style_a)),
        (module.lora_B[ADAPTER], replace(split, style=style_b)),
    ]


def low_rank(module: nn.Module) -> LowRank | None:
    """The low-rank path of a module, None where it has no adapter."""
    return LowRank(module) if has_adapter(module) else None


def add_low_rank(out: torch.Tensor, x: torch.Tensor, path: LowRank | None) -> torch.Tensor:
    """``out``, the base layer's result, plus the adapter's."""
    return out if path is None else out + path(x)
