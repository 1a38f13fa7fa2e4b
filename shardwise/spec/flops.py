"""Floating point operations of a training step, and the share of a device's peak that they are. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.spec.model import ModelSpec


def matrix_parameters(model: ModelSpec) -> int:
    """Number N of weights that every token is multiplied by: projections of all blocks, and the head.

    The embedding is a lookup, norms and biases are not matrices; a tied head counts, since it multiplies.
    """
    return model.num_blocks * model.block_matrix_parameters + model.embedding_parameters


def step_flops(model: ModelSpec, lengths: Iterable[int], num_adapter_parameters: int | None = None) -> int:
    """Model FLOPs of one optimizer step (forward and backward) over rows of ``lengths`` tokens, padding left out.

    A token costs 6 N, and attention 12 L h s more, with N of :func:`matrix_parameters`, L blocks, h the width
    of all heads together and s the tokens of its row (Chowdhery et al. 2022, arXiv:2204.02311, appendix B;
    6 N of Kaplan et al. 2020, arXiv:2001.08361, section 2.1). As there, attention counts whole although it is
    causal, and what is recomputed does not count.

    Args:
        num_adapter_parameters: of the matrices that train where all others are frozen (LoRA): a frozen matrix
            has no weight gradient and costs 4 N, the adapters cost 6 a parameter. None: everything trains.
    """
    counts = list(lengths)
    if num_adapter_parameters is None:
        per_token = 6 * matrix_parameters(model)
    else:
        per_token = 4 * matrix_parameters(model) + 6 * num_adapter_parameters
    attention = 12 * model.num_blocks * model.num_heads * model.head_dim
    return per_token * sum(counts) + attention * sum(length * length for length in counts)


def peak_flops(device_name: str | None, precision: str) -> float | None:
    """Dense peak in FLOP/s of a device, by the name that its driver gives it; None where it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` or ``torch.npu.get_device_name`` say it; None for a CPU.
        precision: ``bf16`` or ``fp32`` (without TF32, which torch does not use for matrix products by default).
    """
    for device in _devices():
        if device_name is not None and re.fullmatch(device["name"], device_name):
            tflops = device[f"{precision}_tflops"]
            return None if tflops is None else tflops * 1e12
    return None


@cache
def _devices() -> list[dict[str, Any]]:
    table: dict[str, list[dict[str, Any]]] = json.loads(
        files("shardwise").joinpath("profiles/devices.json").read_text(encoding="utf-8")
    )
    return table["devices"]
