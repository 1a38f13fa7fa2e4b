"""How far a split run may be from one process: the only place with tolerances.

error(a, b) = ||a - b|| / max(||b||, 1e-3 ||g||), where g is the whole reference gradient (some gradients
are zero in exact arithmetic, and their relative error would be noise). All for dropout 0. They are never
loosened to pass: an error above them has a cause.
"""

from __future__ import annotations

SMALL_GRADIENT = 1e-3  # share of the whole gradient below which a parameter's own norm is no yardstick

FP32_LOSS = 1e-5  # SGD: each of up to 50 steps; AdamW: 20 steps
FP32_NORM = 1e-5  # SGD: each of up to 50 steps; AdamW: 5 steps
FP32_GRADIENT = 1e-5  # every gathered gradient of step 1
SGD_WEIGHTS = 1e-5  # final weights
ADAMW_WEIGHTS = 1e-4  # AdamW divides by the gradient's own size, so rounding weighs more

BF16_LOSS = 2e-3  # bf16 with fp32 masters: 20 steps, against one process in the same precision

FLOAT64_GRADIENT = 1e-9  # the sharp test: rounding is gone, mistakes are not
FLOAT64_LOSS = 1e-9

PROOF = 1e-4  # of a tensor plan on a small copy: modules round to fp32 inside; a wrong plan is off by far more

EXPORT_LOGITS = 1e-5  # largest difference of logits between the live model and its export
MERGED_ROUNDING = 8  # the same after weights are rounded to bf16 or fp16 files, in units of the dtype's epsilon


def relative_error(difference_norm: float, reference_norm: float, gradient_norm: float = 0.0) -> float:
    """The error of the design's parity rule, from three norms."""
    scale = max(reference_norm, SMALL_GRADIENT * gradient_norm)
    if scale == 0.0:
        return 0.0 if difference_norm == 0.0 else float("inf")
    return difference_norm / scale
