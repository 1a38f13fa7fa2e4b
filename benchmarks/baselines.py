"""What a careful user would assemble from plain PyTorch: the sides that Shardwise is measured against.

Every baseline trains the Hugging Face model itself with torch's own parallel APIs and is written for
speed: vocabulary-parallel loss, static pipeline shapes, fused optimizer, one synchronisation a step.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM

from benchmarks.layouts import LEARNING_RATE, LENGTH, MAX_GRAD_NORM, ROWS, Layout

CPU = torch.device("cpu")


class CutModel(nn.Module):
    """Stage ``index`` of ``count`` of a Llama-like model, cut by hand."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        base = model.model
        blocks = list(base.layers)
        bounds = [len(blocks) * i // count for i in range(count + 1)]
        self.layers = nn.ModuleList(blocks[bounds[index] : bounds[index + 1]])
        self.rotary_emb = base.rotary_emb
        self.embed_tokens = base.embed_tokens if index == 0 else None
        last = index == count - 1
        self.norm = base.norm if last else None
        self.lm_head = model.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed_tokens is None else self.embed_tokens(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        if self.norm is None or self.lm_head is None:
            return hidden
        return self.lm_head(self.norm(hidden))


class WholeModel(nn.Module):
    """Ids in, logits out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


class Baseline:
    """One rank of the plain PyTorch assembly of a layout.

    Args:
        optimizer: ``fused`` or ``foreach``, the kind of AdamW.
        head: ``split`` keeps the logits cut over the vocabulary (``loss_parallel``), ``gathered`` gathers them.
        micro_batch_size: rows of a micro-batch of the pipeline.
    """

    def __init__(self, layout: Layout, model_dir: Path, micro_batch_size: int, optimizer: str, head: str) -> None:
        self.layout, self.split_head = layout, head == "split" and layout.tp > 1
        self.mesh = init_device_mesh("cpu", (layout.pp, layout.dp_shard, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
        self.pp_rank = self.mesh.get_local_rank("pp")
        self.dp_rank = self.mesh.get_local_rank("dp")
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
        if layout.tp > 1:
            _split_tensors(model, self.mesh["tp"], self.split_head)
        self.tied_group = self._tied_group() if layout.pp > 1 and model.config.tie_word_embeddings else None
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        self.module: nn.Module = WholeModel(model)
        if layout.pp > 1:
            self.module = CutModel(model, self.pp_rank, layout.pp)
            out = vocab // layout.tp if self.split_head else vocab
            self._make_schedule(micro_batch_size, hidden, out)
        elif layout.dp_shard > 1:
            for block in model.model.layers:
                fully_shard(block, mesh=self.mesh["dp"])
            fully_shard(self.module, mesh=self.mesh["dp"])
        del model
        self.parameters = list(self.module.parameters())
        cut = [p for p in self.parameters if isinstance(p, DTensor)]
        whole = [p for p in self.parameters if not isinstance(p, DTensor)]
        groups = [{"params": group} for group in (cut, whole) if group]  # one fused step may not mix the two
        self.optimizer = torch.optim.AdamW(
            groups, lr=LEARNING_RATE, weight_decay=0.0, fused=optimizer == "fused", foreach=optimizer == "foreach"
        )

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Train on a global batch [rows, length]; the mean loss of its tokens, on every rank."""
        with loss_parallel() if self.split_head else contextlib.nullcontext():
            loss = self._pipeline(ids, targets) if self.layout.pp > 1 else self._plain(ids, targets)
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _plain(self, ids: Tensor, targets: Tensor) -> float:
        rows = slice(self.dp_rank * ROWS // self.layout.dp_shard, (self.dp_rank + 1) * ROWS // self.layout.dp_shard)
        loss = self._mean_loss(self.module(ids[rows]), targets[rows])
        loss.backward()
        loss = loss.detach()
        if self.layout.dp_shard > 1:
            dist.all_reduce(loss)
            loss /= self.layout.dp_shard
        return float(loss)

    def _mean_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.split_head and not isinstance(logits, DTensor):
            logits = DTensor.from_local(logits, self.mesh["tp"], [Shard(-1)], run_check=False)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _make_schedule(self, rows: int, hidden: int, vocab: int) -> None:
        first, last = self.pp_rank == 0, self.pp_rank == self.layout.pp - 1
        border = torch.empty(rows, LENGTH, hidden, device="meta", requires_grad=True)
        stage = PipelineStage(
            self.module,
            self.pp_rank,
            self.layout.pp,
            CPU,
            input_args=torch.empty(rows, LENGTH, dtype=torch.int64, device="meta") if first else border,
            output_args=torch.empty(rows, LENGTH, vocab, device="meta", requires_grad=True) if last else border,
            group=self.mesh.get_group("pp"),
        )
        count = ROWS // rows
        self.schedule = Schedule1F1B(
            stage, count, loss_fn=lambda out, target: self._mean_loss(out, target) / count, scale_grads=False
        )

    def _pipeline(self, ids: Tensor, targets: Tensor) -> float:
        losses: list[Tensor] = []
        if self.pp_rank == 0:
            self.schedule.step(ids)
        elif self.pp_rank == self.layout.pp - 1:
            self.schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step()
        if self.tied_group is not None:
            weight = (self.module.embed_tokens or self.module.lm_head).weight
            if isinstance(weight, DTensor):  # the two ends leave their gradients in different placements
                weight.grad = weight.grad.redistribute(placements=weight.placements)
            dist.all_reduce(_local(weight.grad), group=self.tied_group)
        total = torch.stack([_local(x.detach()) for x in losses]).sum() if losses else torch.zeros(())
        dist.all_reduce(total, group=self.mesh.get_group("pp"))
        return float(total)

    def _tied_group(self) -> dist.ProcessGroup | None:
        own = None
        ranks = self.mesh.mesh.flatten(1)
        for ends in zip(ranks[0].tolist(), ranks[-1].tolist(), strict=True):
            group = dist.new_group(list(ends))
            own = group if dist.get_rank() in ends else own
        return own

    def _clip(self) -> None:
        if self.layout.num_ranks == 1:
            nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
            return
        cut = [p for p in self.parameters if isinstance(p, DTensor)]
        whole = [p for p in self.parameters if not isinstance(p, DTensor)]
        squares = torch.zeros(())
        skipped = self.module.lm_head.weight if self.tied_group is not None and self.pp_rank else None
        if cut:
            squares += _full(nn.utils.get_total_norm([p.grad for p in cut if p is not skipped])) ** 2
        if whole:
            squares += nn.utils.get_total_norm([p.grad for p in whole if p is not skipped]) ** 2
        if self.layout.pp > 1:
            dist.all_reduce(squares, group=self.mesh.get_group("pp"))
        for group in (cut, whole):
            if group:
                nn.utils.clip_grads_with_norm_(group, MAX_GRAD_NORM, squares.sqrt())


def _split_tensors(model: Any, mesh: DeviceMesh, split_head: bool) -> None:
    """The tensor plan that the configuration publishes, with embedding and head cut over the vocabulary."""
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    published: dict[str, str] = model.config.base_model_tp_plan
    plan: dict[str, ParallelStyle] = {
        f"model.{name}": styles[style]() for name, style in published.items() if style in styles
    }
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    # Under a pipeline the logits cross a schedule that knows plain tensors only: they stay local there.
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1) if split_head else Replicate())
    parallelize_module(model, mesh, plan)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
