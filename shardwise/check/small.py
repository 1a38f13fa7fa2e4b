"""The small copy that a plan is proved on: its configuration, adapters, weights and rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.data.format import IGNORED
from shardwise.data.rows import Row
from shardwise.models.build import (
    arrange,
    build_on_meta,
    causal_model,
    freeze_stored_buffers,
    widen,
)
from shardwise.models.lora import Adapters, find_adapters, inject, plain_name
from shardwise.models.packing import check_packing
from shardwise.models.shrink import build_small, shrink
from shardwise.models.structure import find_structure, num_predicted
from shardwise.parallel.tensor import on_small_copy, proven_table
from shardwise.spec.run import LoraConfig, RunConfig
from shardwise.tensor.cache import TableCache
from shardwise.tensor.find import find_tables
from shardwise.tensor.table import ShardingTable

_LENGTHS = (3, 12)  # of rows, both included
PACK_LENGTH = 24  # tokens of packed rows: at least two of them
_BLOCKS_PER_KIND = 2
_CHANCE = {"drop": "dropout", "jitter": "noise"}  # in the names of settings -> what they draw
_NOT_OF_DECODERS = ("classifier", "summary")  # heads of other tasks, which some configurations name
_ADAPTER_STD = 0.1
_SPECIAL_IDS = 5  # the first ids are often those of padding and ends


@dataclass(frozen=True)
class SmallModel:
    """A small copy, without its weights; the same on every rank.

    Args:
        config: of the copy; dropout is 0.
        adapters: of the copy, None where all of it trains.
        num_blocks: its decoder layers.
        notes: what of the user's model the copy leaves out.
        packed: whether rows lie one behind the other, as in the run.
        num_ids: as :attr:`vocab_size`; None: all that the configuration has.
        table: what ``strategy.tp_whole`` leads to at the true sizes, for the copy; None: it finds its own.
    """

    config: Any
    adapters: Adapters | None
    num_blocks: int
    notes: tuple[str, ...]
    packed: bool = False
    num_ids: int | None = None
    table: ShardingTable | None = None

    @property
    def vocab_size(self) -> int:
        """Ids that can be both read and predicted."""
        known: int = self.config.get_text_config(decoder=True).vocab_size
        return min(self.num_ids or known, known)


def shrink_run(run: RunConfig, true_degree: int, degree: int, num_stages: int, tables: TableCache) -> SmallModel:
    """The small copy of a run's model. What the true size decides is decided here, on meta.

    Args:
        true_degree: the plan's tensor degree, whose table is found and proven.
        degree: the tensor degree that the copy is to be split by.
        num_stages: pipeline stages that its blocks have to fill.
        tables: where the true degree's table is looked for first, and kept.

    Raises:
        ConfigError, PlanError: the model cannot be built or described, split by ``true_degree``, or given these
            adapters.
    """
    real = build_on_meta(Path(run.model), run.attn_implementation)
    find_structure(real)
    if true_degree > 1:
        sequence, whole = run.strategy.sequence_parallel, run.strategy.tp_whole
        proven_table(real, true_degree, tables, sequence=sequence, whole=whole)
    lora = None if run.lora is None else _short_lora(run.lora, find_adapters(real, run.lora))
    num_blocks = max(_BLOCKS_PER_KIND, num_stages)
    config, notes = _without_chance(shrink(real.config, degree=degree, num_blocks_per_kind=num_blocks))
    if run.lora is not None and run.lora.dropout:
        notes.append("dropout (lora.dropout)")
    if run.data.packing:
        capacity = run.data.max_length or int(
            getattr(real.config.get_text_config(), "max_position_embeddings", None) or 0
        )
        check_packing(real, capacity)
        notes.append("outputs of modules on packed rows (data.packing): losses, norms and gradients are compared")
    small = build_meta(config, torch.float32)
    adapters = None if lora is None else find_adapters(small, lora)
    table = None
    if run.strategy.tp_whole is not None and degree > 1:
        table = _chosen_table(real, config, degree, run)
    packed, ids = run.data.packing, num_predicted(small)
    return SmallModel(config, adapters, find_structure(small).num_blocks, tuple(notes), packed, ids, table)


def _chosen_table(real: PreTrainedModel, config: Any, degree: int, run: RunConfig) -> ShardingTable:
    """The table of the copy of ``config``, with the choices that the run's bounds lead to at the true sizes."""
    sequence, whole = run.strategy.sequence_parallel, run.strategy.tp_whole

    def find(small: PreTrainedModel) -> ShardingTable:
        return find_tables(real, small, degree, sequence=sequence, whole=whole)[1]

    return on_small_copy(real, degree, find, config)


def build_meta(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model of ``config`` on meta, in training mode, as a run builds the user's."""
    with torch.device("meta"):
        model = causal_model(config, dtype=dtype, attn_implementation=config._attn_implementation)
    arrange(model)
    freeze_stored_buffers(model)
    widen(model, dtype)
    return model.train()


def build_whole(small: SmallModel, dtype: torch.dtype) -> PreTrainedModel:
    """The whole copy with random weights, adapters included, in training mode (without dropout)."""
    model = build_small(small.config, dtype)
    inject(model, small.adapters)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:  # adapters are put in without values
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * _ADAPTER_STD
                module._parameters[name] = nn.Parameter(values.to(parameter.dtype), parameter.requires_grad)
    return model.train()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, under the names that a run knows them by."""
    return {plain_name(name): p.detach().clone() for name, p in model.named_parameters()}


def make_rows(num_rows: int, vocab_size: int) -> list[Row]:
    """Rows of unequal lengths; of every second one only a part is supervised."""
    generator = np.random.default_rng(0)
    rows = []
    for index in range(num_rows):
        length = int(generator.integers(_LENGTHS[0], _LENGTHS[1] + 1))
        ids = generator.integers(min(_SPECIAL_IDS, vocab_size // 2), vocab_size, length).astype(np.int32)
        labels = ids.copy()
        if index % 2:
            labels[: length // 2] = IGNORED
        rows.append(Row(index, index + 1, ids, labels))
    return rows


def _short_lora(lora: LoraConfig, adapters: Adapters) -> LoraConfig:
    """The adapters by the last parts of their modules' names, which the copy has too; without dropout."""
    saved = tuple(dict.fromkeys(name.rpartition(".")[2] for name in adapters.saved))
    targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name in adapters.targets))
    whole = lora.target_modules is None or lora.target_modules == "all-linear"
    changes = {"dropout": 0.0, "modules_to_save": saved, "target_modules": None if whole else targets}
    return lora.model_copy(update=changes)


def _without_chance(config: Any) -> tuple[Any, list[str]]:
    """``config`` without dropout, noise and the auxiliary loss of experts, and what that leaves out."""
    config, notes = copy.deepcopy(config), []
    for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        for key, value in list(vars(part).items()):
            kind = next((_CHANCE[word] for word in _CHANCE if word in key), None)
            if kind is not None and isinstance(value, float) and value > 0.0:
                setattr(part, key, 0.0)
                notes += [] if key.startswith(_NOT_OF_DECODERS) else [f"{kind} ({key})"]
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False
            notes.append("the balance loss of the experts")
    return config, list(dict.fromkeys(notes))
