"""What published training software keeps, sends and hides, by its name: the facts that a row does not print."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.planner.layout import Work

_PRECISION_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "fp4": 2.0}


@dataclass(frozen=True)
class Software:
    """The name of a stack in the profiles, and the fields of ``Work`` in which it differs from the defaults."""

    stack: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def work(self, sequence: int, precision: str) -> Work:
        """The work of a run in a precision."""
        size = _PRECISION_BYTES[precision]
        values: dict[str, Any] = {"compute_bytes": size, "weight_bytes": size, "sent_weight_bytes": size}
        if size == 4.0:
            values |= {"optimizer_bytes": 8.0, "traffic_bytes": 28.0}
        return Work(sequence=sequence, precision=precision, **{**values, **self.fields})


def software_of(row: Mapping[str, str]) -> Software:
    """By the column ``framework`` and the options of a row."""
    framework, options = row.get("framework", "").lower(), row.get("other_opts", "")
    precision = row.get("precision", "").lower()
    half, whole = "fp16" in precision and "bf16" not in precision, "32" in precision
    if "shardwise" in framework:
        return Software("shardwise", {"ours": True})
    if "mindspeed" in framework:
        return Software("mindspeed", _mindspeed(options, half))
    if "mindformers" in framework or "mindspore" in framework:
        # Parameters and their optimizer state are fp32, cast for the products.
        return Software("mindformers", {"overlap_data": False})
    if "deepspeed" in framework and "megatron" in framework:
        stack = "deepspeed-pipeline" if "pp from deepspeed" in framework else "megatron-deepspeed"
        if half:
            kept = {"gradient_bytes": 2.0, "sent_gradient_bytes": 2.0, "accumulation_bytes": 6.0}
        else:  # weights' gradients in bf16, summed in fp32
            kept = {} if whole else {"gradient_bytes": 6.0, "accumulation_bytes": 12.0}
        # Its engine copies gradients into buffers of so many numbers (MEMORY_OPT_ALLREDUCE_SIZE).
        return Software(stack, {"overlap_data": False, "bucket_elements": 5e8, **kept})
    if "deepspeed" in framework:
        fields = {"gradient_bytes": 2.0, "sent_gradient_bytes": 2.0}
        if "offload" in row.get("zero_stage_or_fsdp", "").lower():
            fields |= {"optimizer_bytes": 0.0, "traffic_bytes": 0.0, "host_bytes": 4.0}
        return Software("fsdp", fields)
    if "fsdp" in framework or "composer" in framework or "titan" in framework:
        pure = "PURE" in row.get("zero_stage_or_fsdp", "")
        fields = {"weight_bytes": 4.0, "optimizer_bytes": 8.0, "sent_gradient_bytes": 2.0 if pure else 4.0}
        named = (("composer", "composer"), ("titan", "torchtitan"), ("fsdp2", "torchtitan"))
        stack = next((stack for word, stack in named if word in framework), "fsdp")
        return Software(stack, {**fields, "accumulation_bytes": 4.0})
    old = "2021" in framework or "alpa" in framework
    fields = {"overlap_data": not old and "no comm overlap" not in options and "no p2p" not in options}
    if half and old:
        fields |= {"gradient_bytes": 2.0, "sent_gradient_bytes": 2.0}
    return Software("megatron-2021" if old else "megatron", fields)


def _mindspeed(options: str, half: bool) -> dict[str, Any]:
    # AdamW operator by operator, which has its denominator in memory; what uses a fused kernel needs less.
    fields: dict[str, Any] = {"overlap_data": "overlap-grad-reduce" in options, "copies_update": True}
    if re.search(r"use-mc2|use-ascend-mc2|use-ascend-coc", options):
        fields["overlap_tensor"] = 0.45
    # Tokens are sorted by index kernels, several passes of them in fp32.
    fields["expert_traffic"] = 6.0
    if "moe-grouped-gemm" not in options:
        fields["expert_operators"] = 8.0
    if half:
        fields |= {"gradient_bytes": 2.0, "sent_gradient_bytes": 2.0}
    if "no-gradient-accumulation-fusion" in options:
        fields["accumulation_bytes"] = 12.0
    if "swap-optimizer" in options:
        fields["host_bytes"] = 24.0
    if "reuse-fp32-param" in options:
        fields["optimizer_bytes"] = 10.0
    return fields
