"""Float64 that stays float64: Hugging Face's modules round to fp32 inside (norms, softmax, routers)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_COARSE = (torch.float32, torch.bfloat16, torch.float16)


class Exact(TorchFunctionMode):
    """Ignores a request for fp32 on a float64 tensor, so that mistakes stand alone and rounding does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.backward, torch.autograd.backward):
            return self._backward(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype is torch.float64:
            if func is torch.Tensor.float:
                return first
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)

    def _backward(self, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, **_: Any) -> None:
        """A mode is off in its own handler, and blocks are recomputed inside of a backward pass: so into the engine."""
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        given = (None,) * len(tensors) if grad_tensors is None else tuple(grad_tensors)
        grads = tuple(torch.ones_like(t) if g is None else g for t, g in zip(tensors, given, strict=True))
        with self:
            _engine_run_backward(
                tensors, grads, bool(retain_graph), False, (), allow_unreachable=True, accumulate_grad=True
            )


class Rounding(TorchDispatchMode):
    """Notes whether float64 values are rounded to fewer digits: then errors are those of the lower precision."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype in _COARSE:
            self.found |= any(isinstance(arg, torch.Tensor) and arg.dtype is torch.float64 for arg in args)
        return out
