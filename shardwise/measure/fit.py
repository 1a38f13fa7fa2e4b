"""From timed samples to the numbers of a profile: robust fits of the planner's own formulas. Imports no torch.

The forms are those of ``planner/compute`` and ``planner/collectives``, written again here because a profile is made
below the planner; a test holds both to each other. Errors are medians of |predicted / measured - 1|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from shardwise.measure.samples import AttentionSample, CollectiveSample, ElementwiseSample, ProductSample

_HALF_SIZES = np.geomspace(1.0, 1000.0, 121)
_REWEIGHTED = 30  # rounds in which large residuals lose their weight
_HEAD_SIZE, _HALF_HEAD, _HALF_ROW = 128, 96, 256
_BACKWARD_ATTENTION = 2.5 / 0.85


@dataclass(frozen=True)
class Fitted:
    """One fit: ``values`` by name, and the median relative error over ``number`` samples."""

    values: dict[str, float]
    error: float
    number: int


def fit_products(samples: Sequence[ProductSample]) -> Fitted:
    """``rate`` of an endless product in FLOP/s, and ``half_size``: R x prod(side / (side + h)) is the speed.

    For each h the rate is the median over samples, so one slow sample moves nothing; h is the one with the least
    median error.
    """
    flops = np.array([2.0 * one.rows * one.inner * one.outer for one in samples])
    speeds = flops / np.array([one.seconds for one in samples])
    sides = np.array([(one.rows, one.inner, one.outer) for one in samples], dtype=float)
    best: tuple[float, float, float] | None = None
    for half in _HALF_SIZES:
        shapes = np.prod(sides / (sides + half), axis=1)
        rate = float(np.exp(np.median(np.log(speeds / shapes))))
        error = float(np.mean(np.abs(np.log(rate * shapes / speeds))))
        if best is None or error < best[0]:
            best = error, rate, float(half)
    assert best is not None
    _, rate, half = best
    error = _error(rate * np.prod(sides / (sides + half), axis=1), speeds)
    return Fitted({"rate": rate, "half_size": half, "fastest": float(speeds.max())}, error, len(samples))


def rate_of(samples: Sequence[ProductSample], half_size: float) -> Fitted:
    """``rate`` alone, where ``half_size`` is known."""
    rates = []
    for one in samples:
        shape = math.prod(side / (side + half_size) for side in (one.rows, one.inner, one.outer))
        rates.append(2.0 * one.rows * one.inner * one.outer / one.seconds / shape)
    rate = median(rates)
    return Fitted({"rate": rate}, median(abs(rate / each - 1) for each in rates), len(samples))


def fit_attention(samples: Sequence[AttentionSample], peak: float) -> Fitted:
    """``efficiency``: the share of ``peak`` that the fused kernel's forward pass reaches at head size 128."""
    shares = [_attention_flops(one) / one.seconds / peak for one in samples]
    share = median(shares)
    return Fitted({"efficiency": share}, median(abs(share / each - 1) for each in shares), len(samples))


def _attention_flops(one: AttentionSample) -> float:
    """FLOPs of both passes, each divided by its speed as a share of the efficiency that is looked for."""
    seen, width = one.length / 2, float(one.head_dim)
    speed = width / (width + _HALF_HEAD) * (_HEAD_SIZE + _HALF_HEAD) / _HEAD_SIZE * seen / (seen + _HALF_ROW)
    forward = 2.0 * one.rows * one.length * one.heads * seen * 2 * width / min(speed, 1.3)
    return forward * (1 + _BACKWARD_ATTENTION)


def fit_elementwise(samples: Sequence[ElementwiseSample], operator_seconds: float) -> Fitted:
    """``bandwidth``: the fastest in bytes/s, and ``efficiency``: what share of it is usual.

    The least time of an operator is taken off first, as the formulas add it.
    """
    rates = [one.moved_bytes / max(one.seconds - operator_seconds, 0.05 * one.seconds) for one in samples]
    usual, fastest = median(rates), max(rates)
    error = median(abs(usual / rate - 1) for rate in rates)
    return Fitted({"bandwidth": fastest, "efficiency": usual / fastest}, error, len(samples))


def fit_collectives(samples: Sequence[CollectiveSample], ring: bool) -> Fitted:
    """``latency`` of a step and ``bandwidth`` of a rank: time = steps x latency + bytes on the wire / bandwidth.

    Least absolute relative errors, by weighted least squares whose weights are made anew each round. With ``ring`` a
    collective takes a step for each further rank, else one for each doubling.
    """
    rows = np.array([_wire(one, ring) for one in samples])
    seconds = np.array([one.seconds for one in samples])
    solution = _least_absolute(rows / seconds[:, None], np.ones(len(samples)))
    latency, per_byte = float(solution[0]), max(float(solution[1]), 1e-15)
    error = _error(rows @ np.array([latency, per_byte]), seconds)
    return Fitted({"latency": latency, "bandwidth": 1 / per_byte}, error, len(samples))


def fit_factor(samples: Sequence[CollectiveSample], wire: Mapping[str, float], ring: bool) -> Fitted:
    """``factor``: how many times longer one kind of collective takes than by ``wire`` of :func:`fit_collectives`."""
    ratios = []
    for one in samples:
        steps, num_bytes = _wire(one, ring)
        ratios.append(one.seconds / (steps * wire["latency"] + num_bytes / wire["bandwidth"]))
    factor = median(ratios)
    return Fitted({"factor": factor}, median(abs(factor / ratio - 1) for ratio in ratios), len(ratios))


def _wire(one: CollectiveSample, ring: bool) -> tuple[float, float]:
    """Steps of latency and bytes of a rank, as the planner counts them."""
    if one.op == "send":
        return 1.0, float(one.num_bytes)
    times = 2.0 if one.op == "all_reduce" else 1.0
    steps = one.ranks - 1 if ring else math.log2(one.ranks)
    return times * steps, times * one.num_bytes * (one.ranks - 1) / one.ranks


def _least_absolute(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x >= 0, two numbers, with the least sum of |rows x - wanted|."""
    weights = np.ones(len(wanted))
    found = np.zeros(2)
    for _ in range(_REWEIGHTED):
        found = _least_squares(rows * weights[:, None], wanted * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ found - wanted), 1e-3))
    return found


def _least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x >= 0, two numbers, with the least sum of squares: where the free answer has one below 0, that one is 0."""
    found: np.ndarray = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    for index in range(2):
        if found[index] < 0:
            other = rows[:, 1 - index]
            found = np.zeros(2)
            found[1 - index] = max(float(other @ wanted) / float(other @ other), 0.0)
            break
    return found


def by_size(samples: Sequence[CollectiveSample], key: Callable[[CollectiveSample], int]) -> list[CollectiveSample]:
    """The samples with times that never fall as ``key`` grows: a larger message that came out faster was disturbed
    less, so the smaller ones are no slower than it."""
    kept: list[CollectiveSample] = []
    least = float("inf")
    for one in sorted(samples, key=key, reverse=True):
        least = min(least, one.seconds)
        kept.append(CollectiveSample(one.op, one.ranks, one.num_bytes, least))
    return kept[::-1]


def _error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.median(np.abs(predicted / measured - 1)))
