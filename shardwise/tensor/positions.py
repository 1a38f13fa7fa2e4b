"""The residual stream cut along the sequence (Korthikanti et al. 2022, arXiv:2205.05198), while a model runs.

Between blocks, and in the norms and sums of a block, a rank holds its positions alone. Every rank holds as many,
ceil(length / ranks); those behind the end repeat the last position, and nothing reads what becomes of them. Where
modules want the whole sequence it is gathered, and what they give is reduced and scattered again: the bytes of the
all-reduce that stands there otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.tensor.collectives import cut, join
from shardwise.tensor.group import TensorGroup
from shardwise.tensor.table import SequenceSplit

Call = Callable[..., Any]


class Positions:
    """The positions of this rank in the pass that runs: set where the hidden state is cut, read all the way.

    Tensors are [rows, positions, ...], or lists of tokens [rows * positions, ...] as experts take them. Of a list
    that is gathered the ranks' tokens come one after the other, which is right where each token is by itself. A list
    may hold all tokens once for each of several experts, one expert after the other: of each all ranks' tokens follow.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.rows = self.length = 0

    @property
    def own(self) -> int:
        """Number of positions of a rank."""
        return -(-self.length // self.group.size)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, length, ...] on every rank, to this rank's positions; its gradient is whole again."""
        self.rows, self.length = hidden.shape[:2]
        missing = self.own * self.group.size - self.length
        if missing:
            hidden = torch.cat([hidden, hidden[:, -1:].expand(-1, missing, *hidden.shape[2:])], dim=1)
        return cut(hidden, self.group, 1, summed=False)

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's positions, to [rows, length, ...], which all ranks go on with alike."""
        return join(hidden, self.group, 1, self.length, shares=False)

    def gather(self, x: torch.Tensor, num_experts: int = 1) -> torch.Tensor:
        """The ranks' positions, to all of them; of what follows each rank has a share of the gradient."""
        if x.dim() > 2:
            return join(x, self.group, 1, self.length, shares=True)
        times = num_experts if x.shape[0] == num_experts * self.rows * self.own else 1
        by_expert = x.unflatten(0, (times, -1))
        return join(by_expert, self.group, 1, by_expert.shape[1] * self.group.size, shares=True).flatten(0, 1)

    def scatter(self, partial: torch.Tensor, num_experts: int = 1) -> torch.Tensor:
        """Partial results for all positions, to the sum over the ranks for this rank's."""
        if partial.dim() > 2:
            return cut(partial, self.group, 1, summed=True)
        tokens = self.rows * self.own * self.group.size
        by_expert = partial.unflatten(0, (num_experts if partial.shape[0] == num_experts * tokens else 1, -1))
        return cut(by_expert, self.group, 1, summed=True).flatten(0, 1)

    def keep(self, out: torch.Tensor) -> torch.Tensor:
        """A result that all ranks have for all positions, to this rank's; its gradient becomes a share."""
        dim = int(out.dim() > 2)
        start, stop = self.group.rank * self.own, (self.group.rank + 1) * self.own
        if dim == 0:
            size = out.shape[0] // self.group.size
            return out.narrow(0, self.group.rank * size, size)
        inside = out[:, start:stop]
        missing = self.own - inside.shape[1]
        return torch.cat([inside, out.new_zeros(out.shape[0], missing, *out.shape[2:])], dim=1) if missing else inside

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """What the ranks hold of their positions ([rows, own, ...] or a list), as [rows, length, ...] on all of them.

        All ranks go on with it alike.
        """
        return self.leave(own.unflatten(0, (self.rows, self.own)) if own.dim() == 2 else own)

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        """[rows, length, ...] where ``shape`` is that of a tensor of this rank's positions, else ``shape``."""
        if len(shape) > 2 and shape[:2] == (self.rows, self.own):
            return torch.Size((self.rows, self.length, *shape[2:]))
        if len(shape) == 2 and shape[0] == self.rows * self.own:
            return torch.Size((self.rows, self.length, shape[1]))
        return shape

    def own_mask(self, whole: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Of a mask of :meth:`whole_shape` that of this rank's tensor of ``shape``, up to its last dim."""
        if whole.shape[:-1] == shape[:-1]:
            return whole
        first = self.group.rank * self.own
        places = torch.arange(first, first + self.own, device=whole.device).clamp(max=self.length - 1)
        own = whole.index_select(1, places)
        return own if len(shape) > 2 else own.flatten(0, 1)


def cut_sequence(model: nn.Module, split: SequenceSplit, positions: Positions) -> None:
    """Let the blocks of ``model`` run on this rank's positions, and the modules of ``split`` on all of them.

    The blocks of other stages have no parameters and are passed over: the borders of a stage see whole tensors.
    """
    owned = [block for block in model.get_submodule(split.blocks) if any(True for _ in block.parameters())]
    if not owned:
        return
    owned[0].register_forward_pre_hook(_entering(positions), with_kwargs=True)
    owned[-1].register_forward_hook(_leaving(positions))
    for name, module in model.named_modules():
        if name in split.gathered and any(True for _ in module.parameters()):
            module.forward = _gathering(module.forward, split.gathered[name], positions)  # type: ignore[method-assign]


def _entering(positions: Positions) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (positions.enter(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": positions.enter(kwargs["hidden_states"])}

    return hook


def _leaving(positions: Positions) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
    def hook(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        return (positions.leave(out[0]), *out[1:]) if isinstance(out, tuple | list) else positions.leave(out)

    return hook


def _gathering(own: Call, keys: tuple[str, ...], positions: Positions) -> Call:
    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(positions.gather(x) if str(place) in keys else x for place, x in enumerate(args))
        return own(*args, **{key: positions.gather(x) if key in keys else x for key, x in kwargs.items()})

    return forward
