"""Times of one rank's work: products, attention, elementwise operators, and the least operator."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from shardwise.measure.clock import Clock
from shardwise.measure.samples import AttentionSample, ElementwiseSample, ProductSample

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Rows, inner and outer side: squares, and the shapes of projections, of a wide feed-forward part and of a head.
_PRODUCTS = {
    "quick": ((128, 128, 128), (512, 256, 256), (512, 512, 512), (512, 512, 2048), (1024, 1024, 1024)),
    "full": (
        *((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)),
        *((512, 128, 512), (512, 256, 256), (256, 512, 2048), (512, 1024, 4096), (128, 512, 16384), (2048, 256, 1024)),
    ),
}
_ATTENTION = {  # kernel, rows, heads, length, head size
    "quick": (("fused", 2, 4, 256, 64), ("fused", 2, 4, 512, 64), ("eager", 2, 4, 256, 64)),
    "full": (
        *(("fused", 2, 4, 128, 64), ("fused", 2, 4, 256, 64), ("fused", 2, 8, 512, 64), ("fused", 1, 8, 1024, 64)),
        *(("fused", 2, 8, 256, 32), ("fused", 2, 4, 512, 128)),
        *(("eager", 2, 4, 128, 64), ("eager", 2, 4, 256, 64), ("eager", 1, 8, 512, 64)),
    ),
}
_ELEMENTS = {"quick": (2**17, 2**20), "full": (2**16, 2**18, 2**20, 2**22)}
_CHAIN = 100  # operators of a chain whose work is nothing


def precisions(device: torch.device) -> tuple[str, ...]:
    """Those that products are timed in."""
    return ("fp32", "bf16") if device.type != "npu" else ("bf16", "fp32")


def time_products(clock: Clock, level: str) -> Iterator[ProductSample]:
    """Products of several sizes; in bf16 those with a side of 512 and more, whose speed tells its peak."""
    for precision in precisions(clock.device):
        for rows, inner, outer in _PRODUCTS[level]:
            if precision == "bf16" and min(rows, inner, outer) < 512:
                continue
            left = torch.randn(rows, inner, device=clock.device).to(_DTYPES[precision])
            right = torch.randn(outer, inner, device=clock.device).to(_DTYPES[precision])
            seconds = clock.alone(partial(functional.linear, left, right))
            yield ProductSample(precision, rows, inner, outer, seconds)


def time_attention(clock: Clock, level: str) -> Iterator[AttentionSample]:
    """Causal attention forward and backward: the fused kernel, and one that writes its scores to memory."""
    for kernel, rows, heads, length, head_dim in _ATTENTION[level]:
        shape = (rows, heads, length, head_dim)
        inputs = [torch.randn(shape, device=clock.device, requires_grad=True) for _ in range(3)]
        gradient = torch.randn(shape, device=clock.device)
        mask = torch.full((length, length), float("-inf"), device=clock.device).triu(1)

        def both(
            inputs: list[torch.Tensor] = inputs,
            gradient: torch.Tensor = gradient,
            mask: torch.Tensor = mask,
            kernel: str = kernel,
        ) -> None:
            query, key, value = inputs
            if kernel == "fused":
                output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            else:
                scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + mask
                output = scores.softmax(-1) @ value
            torch.autograd.grad(output, inputs, gradient)

        yield AttentionSample(kernel, rows, heads, length, head_dim, clock.alone(both))


def time_elementwise(clock: Clock, level: str) -> Iterator[ElementwiseSample]:
    """Operators of a block that only move memory, on tensors that caches hold and on some that they do not."""
    for number in _ELEMENTS[level]:
        one, other = (torch.randn(number, device=clock.device) for _ in range(2))
        out = torch.empty_like(one)
        size = float(number * one.element_size())
        yield ElementwiseSample("add", 3 * size, clock.alone(partial(torch.add, one, other, out=out)))
        yield ElementwiseSample("new_product", 3 * size, clock.alone(partial(torch.mul, one, other)))
        yield ElementwiseSample("silu", 2 * size, clock.alone(partial(functional.silu, one)))
        rows = one.view(-1, 512)
        yield ElementwiseSample("norm", 2 * size, clock.alone(partial(functional.rms_norm, rows, (512,))))


def time_operator(clock: Clock) -> float:
    """Seconds that the least operator takes, with gradients: a forward pass counts once, a backward pass 1.5 times."""
    value = torch.ones(16, device=clock.device, requires_grad=True)

    def chain() -> None:
        result = value
        for _ in range(_CHAIN):
            result = result * 1.0
        torch.autograd.grad(result.sum(), value)

    return clock.alone(chain) / _CHAIN / 2.5
