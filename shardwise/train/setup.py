"""From ``run.yaml`` and ``plan.json`` to a model with its weights, the rows and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.naming import Naming, default_naming, naming_of_folder
from shardwise.data.loader import Loader, LoaderSettings
from shardwise.data.rows import Row
from shardwise.models.build import build_on_meta
from shardwise.models.calling import num_positions
from shardwise.models.describe import describe_sizes
from shardwise.models.init import distributions, fill_random
from shardwise.models.lora import Adapters, find_adapters
from shardwise.models.structure import find_structure, num_predicted
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.tensor import NO_TABLES
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig
from shardwise.spec.template import template_text
from shardwise.tensor.cache import TableCache
from shardwise.tensor.table import ShardingTable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A parallel model with its weights, and what an export needs to know of the whole model.

    ``naming`` is that of the base model's files; ``adapters`` is None where all of it trains.
    """

    model: ParallelModel
    naming: Naming
    adapters: Adapters | None = None


class Blueprint:
    """The whole model of a run on meta, built at the first use and once: big ones take seconds.

    :func:`load_model` cuts it, so nothing else may look at it afterwards.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model with all parameters and buffers on meta.

        Raises:
            ConfigError: what :func:`shardwise.models.build.build_on_meta` refuses.
        """
        run = self._run
        return build_on_meta(Path(run.model), run.attn_implementation, DTYPES[run.train.precision or "fp32"])

    @cached_property
    def adapters(self) -> Adapters | None:
        """What is added to the model, None where all of it trains.

        Raises:
            ConfigError: what :func:`shardwise.models.lora.find_adapters` refuses.
        """
        return find_adapters(self.model, self._run.lora) if self._run.lora is not None else None


def load_model(
    run: RunConfig, plan: Plan, mesh: Mesh, blueprint: Blueprint | None = None, tables: TableCache = NO_TABLES
) -> tuple[LoadedModel, Plan]:
    """Build on meta, split by the plan, read or draw this rank's slices; ``tables`` may know how to split.

    Args:
        blueprint: of the same run, where something else has needed the model before; None: built here.

    Returns:
        The model, and the plan with its sharding table and the model's exact sizes filled in.
    """
    folder, blueprint = Path(run.model), blueprint or Blueprint(run)
    hf_model, adapters = blueprint.model, blueprint.adapters
    plan = replace(plan, model=measured(plan.model, hf_model, folder))
    names = {name for name, _ in hf_model.named_parameters()}
    random = run.model_init == "random"
    naming = default_naming(hf_model, declared_dtype(folder)) if random else naming_of_folder(folder, hf_model)
    dists = distributions(hf_model) if random else {}
    given = None if plan.table is None else ShardingTable.from_json(plan.table)
    model, table = parallelize(
        hf_model, mesh, adapters, run.train.seed, compiled=run.train.compile, tables=tables, given=given
    )
    base = [shard for shard in model.shards if shard.layout.source in names]
    if random:
        fill_random(base, dists, run.train.seed)
    else:
        load_slices(folder, base, naming)
    if adapters is not None:
        added = [shard for shard in model.shards if shard.layout.source not in names]
        fill_random(added, adapters.distributions, run.train.seed)
    return LoadedModel(model, naming, adapters), replace(plan, table=table.to_json())


def measured(spec: ModelSpec, model: PreTrainedModel, folder: Path) -> ModelSpec:
    """``spec`` with the numbers of ``model``, whole and on meta, where they were read or estimated."""
    if spec.measured:
        return spec
    exact = describe_sizes(model, find_structure(model), folder)
    return replace(exact, hash=spec.hash, has_weights=spec.has_weights)


def within_tables(plan: Plan, model: nn.Module) -> Plan:
    """``plan`` with no more positions and ids than ``model`` has for tokens.

    The first rows of some tables of positions are not for them, and some heads predict fewer ids than can be read.
    """
    spec = plan.model
    positions = min(num_positions(model) or spec.max_position_embeddings, spec.max_position_embeddings)
    ids = min(num_predicted(model) or spec.vocab_size, spec.vocab_size)
    return replace(plan, model=replace(spec, max_position_embeddings=positions, vocab_size=ids))


def companions(run: RunConfig) -> Companions:
    """What a run writes beside its weights."""
    template = None if run.chat_template is None else template_text(run.chat_template)
    return Companions(Path(run.model), Path(run.tokenizer) if run.tokenizer else None, template)


def declared_dtype(folder: Path) -> torch.dtype:
    """The dtype that a folder's ``config.json`` names; fp32 where it names none."""
    declared = AutoConfig.from_pretrained(folder).dtype
    dtype = getattr(torch, declared) if isinstance(declared, str) else declared
    return dtype or torch.float32


def make_loader(rows: Sequence[Row], run: RunConfig, plan: Plan, mesh: Mesh) -> Loader:
    """The loader of this rank's rows."""
    seed = run.data.seed if run.data.seed is not None else run.train.seed
    settings = LoaderSettings(
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.strategy.micro_batch_size,
        data_rank=mesh.data_rank,
        num_data_ranks=plan.strategy.dp,
        min_micro_batches=plan.strategy.pp,
        shuffle=run.data.shuffle,
        seed=seed,
        drop_last=run.data.drop_last,
        log_rows=run.log.rows,
        packing=run.data.packing,
        # No further than the positions that the model has, since padding counts on from the last row.
        pack_length=min(run.data.max_length, plan.model.max_position_embeddings) if run.data.max_length else None,
        group_by_length=run.data.group_by_length,
    )
    return Loader(rows, settings)
