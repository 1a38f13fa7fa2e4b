"""One peer's training job, written as its own documentation has it; run by ``benchmarks.peers``.

Imports nothing of Shardwise: it runs in the peers' environment.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROWS = 8
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0


def main() -> None:
    """Run the side that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=sorted(SIDES), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--adapter", help="PEFT folder to start from, so that all sides start alike")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    SIDES[options.side](options)


def _read_rows(options: argparse.Namespace) -> list[list[int]]:
    return [json.loads(line)["input_ids"] for line in options.rows.read_text(encoding="utf-8").splitlines()]


def _batches(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    rows = _read_rows(options)
    for step in range(options.steps):
        yield torch.tensor(rows[step * ROWS : (step + 1) * ROWS])


def _say(options: argparse.Namespace, step: int, loss: float) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def _load(options: argparse.Namespace, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **settings)
    if options.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, options.adapter, is_trainable=True)
    return model.train()


def _loop(options: argparse.Namespace, model: Any) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Torch's fused step takes no DTensors of several kinds; without tensor parallelism it is used.
    split = any(type(p.data).__name__ == "DTensor" for p in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=not split)
    for step, ids in enumerate(_batches(options), start=1):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        _clip(parameters)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.detach()
        _say(options, step, float(value.full_tensor() if hasattr(value, "full_tensor") else value))


def _clip(parameters: list[Any]) -> None:
    """Torch's clipping takes no mixture of DTensors and plain tensors; then the same by hand."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(hasattr(grad, "full_tensor") for grad in grads):
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        return
    squares = [grad.norm() ** 2 for grad in grads]
    total = sum(float(s.full_tensor() if hasattr(s, "full_tensor") else s) for s in squares) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, MAX_GRAD_NORM / (total + 1e-6)))


def plain(options: argparse.Namespace) -> None:
    """A loop of plain PyTorch on one process."""
    _loop(options, _load(options))


def hf_tp(options: argparse.Namespace) -> None:
    """Tensor parallelism of transformers itself under a plain loop."""
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    _loop(options, _load(options, distributed_config=DistributedConfig(tp_size=size)))
    dist.destroy_process_group()


def torch_fsdp2(options: argparse.Namespace) -> None:
    """Torch's ``fully_shard`` on each block and on the model, under a plain loop."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (size,))
    model = _load(options)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no averaging sum
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(size))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for step, ids in enumerate(_batches(options), start=1):
        loss = model(input_ids=ids[rank::size], labels=ids[rank::size], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.detach()
        dist.all_reduce(value)
        _say(options, step, float(value) / size)
    dist.destroy_process_group()


def deepspeed_autotp(options: argparse.Namespace) -> None:
    """DeepSpeed's automatic tensor parallelism."""
    import deepspeed

    size = int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed(dist_backend="gloo")
    model = deepspeed.tp_model_init(_load(options), tp_size=size, dtype=torch.float32)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_GRAD_NORM,
        "tensor_parallel": {"autotp_size": size},
        "zero_optimization": {"stage": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": True},
        },
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    for step, ids in enumerate(_batches(options), start=1):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        _say(options, step, float(loss.detach()))


def hf_trainer(options: argparse.Namespace) -> None:
    """The Hugging Face Trainer: one process, or DDP under torchrun."""
    _trainer(options)


def hf_fsdp2(options: argparse.Namespace) -> None:
    """The Hugging Face Trainer with FSDP2."""
    _trainer(options, fsdp=True, fsdp_config={"version": 2, "reshard_after_forward": True})


def _trainer(options: argparse.Namespace, **settings: Any) -> None:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    class Say(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                _say(options, state.global_step, logs["loss"])

    arguments = TrainingArguments(
        output_dir=str(options.out.with_suffix(".d")),
        per_device_train_batch_size=ROWS // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=options.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in _read_rows(options)]
    trainer = InOrder(model=_load(options), args=arguments, train_dataset=rows, callbacks=[Say()])
    trainer.train()
    if "fsdp" in settings and not any(type(p.data).__name__ == "DTensor" for p in trainer.model.parameters()):
        raise SystemExit("NotSharded Error: FSDP was asked for, and the weights are whole on every rank")


SIDES = {
    "plain": plain,
    "hf-trainer": hf_trainer,
    "hf-fsdp2": hf_fsdp2,
    "torch-fsdp2": torch_fsdp2,
    "hf-tp": hf_tp,
    "deepspeed-autotp": deepspeed_autotp,
}

if __name__ == "__main__":
    main()
