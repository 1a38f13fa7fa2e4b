"""Float64 that stays float64: Hugging Face's modules round to fp32 inside (norms, softmax, routers)."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Exact(TorchFunctionMode):
    """Ignores a request for fp32 on a float64 tensor, so that mistakes stand alone and rounding does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype is torch.float64:
            if func is torch.Tensor.float:
                return first
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
