"""A model under a plan: one object whose step looks the same however it is split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.models.shard import Shard, follow_masters
from shardwise.parallel.buckets import ReplicaSums
from shardwise.parallel.clip import owned_squared_norm
from shardwise.parallel.engine import PipelineEngine, StageShapes
from shardwise.parallel.fsdp import set_last_micro_batch
from shardwise.parallel.loss import token_loss_sum
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.pipeline import Stage
from shardwise.parallel.replicate import sum_gradients, tied_shards
from shardwise.spec.layout import chunk_range


class ParallelModel:
    """One rank's part of the model, and the passes over a step's micro-batches.

    ``stages`` are this rank's parts of the pipeline in the order of the model, ``shards`` their parameters;
    ``num_logits`` of a token over all tensor ranks, None: as many as the configuration has ids.

    All batches are three int64 tensors [micro-batches, rows, length]: ids, shifted targets (-100: not
    supervised) and position ids. They are equal on the tensor and pipeline ranks of a data rank.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        shards: Sequence[Shard],
        mesh: Mesh,
        tied_group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype,
        *,
        num_logits: int | None = None,
        split_logits: bool = True,
    ) -> None:
        self.stages, self.shards, self.mesh = tuple(stages), tuple(shards), mesh
        self.tied_group = tied_group
        config = self.stages[0].model.config.get_text_config()
        self._dtype = compute_dtype  # of activations, which may be coarser than the stored weights
        split_logits &= mesh.size("tp") > 1
        parts, part = (mesh.size("tp"), mesh.coordinate("tp")) if split_logits else (1, 0)
        self._vocab = chunk_range(num_logits or config.vocab_size, parts, part)
        self._tp_group = mesh.group("tp") if split_logits else None
        # FSDP2 sums over the replicas by itself.
        self._replica_sums = (
            ReplicaSums(self.shards, mesh.group("dp_replicate"), mesh.strategy.gradient_aggregation_group)
            if mesh.size("dp_replicate") > 1 and mesh.size("dp_shard") == 1
            else None
        )
        self._engine = (
            PipelineEngine(self.stages, mesh.strategy, mesh.group("pp"), mesh.device) if mesh.size("pp") > 1 else None
        )

    def begin_step(self, step: int) -> None:
        """Dropout of the passes that follow is that of optimizer step ``step``."""
        for stage in self.stages:
            if stage.dropout is not None:
                stage.dropout.begin_step(step)

    def forward_backward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor,
        num_tokens: int,
        real: tuple[torch.Tensor, int] | None = None,
    ) -> float:
        """Add the gradient of (sum of token losses) / ``num_tokens``, and of the routers' loss, to the parameters.

        Args:
            num_tokens: supervised tokens of the whole step, over all data ranks; at least 1.
            real: tokens that are no padding: of each row [micro-batches, rows], and of the whole step over all
                data ranks; None: every token.

        Returns:
            This rank's share of the step's loss: the shares of all ranks sum to it.
        """
        if self._replica_sums is not None:
            # With halves of backward passes a gradient may be added to twice for a micro-batch.
            halves = any(stage.deferred is not None for stage in self.stages)
            self._replica_sums.begin(0 if halves else len(ids))
        balances = [stage.balance for stage in self.stages if stage.balance is not None]
        if balances:
            everything = torch.full(ids.shape[:2], ids.shape[2], device=ids.device)
            lengths, step_tokens = real or (everything, ids.numel() * self.mesh.strategy.dp)
            for balance in balances:
                balance.begin(lengths, step_tokens)
        loss = self._run(ids, targets, positions, 1.0 / num_tokens, backward=True)
        if self.mesh.coordinate("tp") == 0:  # every tensor rank has all of it
            loss += sum(balance.finish() for balance in balances)
        else:
            for balance in balances:
                balance.finish()
        if self._replica_sums is not None:
            self._replica_sums.finish()
        sum_gradients(self.shards, self.mesh, self.tied_group)
        return loss

    @torch.no_grad()
    def evaluate(self, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> float:
        """This rank's share of the sum of token losses; no gradients, no dropout."""
        self._set_training(False)
        try:
            return self._run(ids, targets, positions, 1.0, backward=False)
        finally:
            self._set_training(True)

    def squared_norm(self) -> float:
        """This rank's share of the squared norm of the whole gradient."""
        return float(owned_squared_norm(self.shards))

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.set_grad(None)

    def tied_copies_agree(self) -> bool:
        """Whether this rank's copies of tied weights equal the largest of both copies (True where it holds none).

        If the copies differ anywhere, at least one of the two ranks answers False.
        """
        agree = True
        for shard in tied_shards(self.shards) if self.tied_group is not None else []:
            largest = shard.data.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.tied_group)
            agree &= torch.equal(largest, shard.data)
        return agree

    def _set_training(self, training: bool) -> None:
        for stage in self.stages:
            stage.train(training)

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor, scale: float) -> torch.Tensor:
        return token_loss_sum(logits, targets, self._vocab[0], self._tp_group) * scale

    def _run(
        self, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor, scale: float, *, backward: bool
    ) -> float:
        follow_masters(self.shards)
        if self._engine is None:
            losses = self._run_without_pipeline(ids, targets, positions, scale, backward)
        else:
            num_micro_batches, rows, length = ids.shape
            local_vocab = self._vocab[1] - self._vocab[0]
            shapes = StageShapes(rows, length, num_micro_batches, local_vocab, self._dtype)
            losses = self._engine.run(
                shapes, ids, targets, positions, lambda output, target: self._loss(output, target, scale), backward
            )
        if not self.mesh.counts_loss:
            return 0.0
        return float(torch.stack([loss.detach().double() for loss in losses]).sum())

    def _run_without_pipeline(
        self, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor, scale: float, backward: bool
    ) -> list[torch.Tensor]:
        losses = []
        (stage,) = self.stages
        for index in range(len(ids)):
            if backward:
                set_last_micro_batch(stage, index == len(ids) - 1, self.mesh.strategy.reshard)
            loss = self._loss(stage(ids[index], position_ids=positions[index]), targets[index], scale)
            if backward:
                loss.backward()
            losses.append(loss.detach())
        return losses
