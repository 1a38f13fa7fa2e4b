"""Whether rows that lie one behind the other in one row of a batch stay apart in a model.

transformers builds block-diagonal masks from position ids that begin anew, in models that make their masks in its
common way. State that runs along the sequence (Mamba, linear attention, convolutions), and masks that a model makes
in a way of its own (ALiBi's), do not know of them. So it is tried, on a small copy of the model with its kind of
attention; a list of names would be wrong with the next version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import ConfigError
from shardwise.models.calling import call_model
from shardwise.models.shrink import build_small, shrink

_PACKED = ((9, 1, 6, 2), (4, 14))  # lengths of rows by the row that they lie in; more than the copy's window
_LIMIT = 1e-4  # above what modules lose that compute in fp32, and far below what a row takes from another
_SPECIAL_IDS = 5  # the first ids are often those of padding and ends

Outputs = dict[str, torch.Tensor]  # module -> [1, length, ...], in the order in which modules return


def check_packing(model: PreTrainedModel, capacity: int) -> None:
    """Refuse a model in which packed rows do not give what they give apart.

    Args:
        model: whole, on meta or not; its configuration and kind of attention alone are looked at.
        capacity: the most tokens that packed rows may fill together.

    Raises:
        ConfigError: the module that mixes them; or that no small copy can be built or run; or rotary positions whose
            factors depend on how many tokens there are, and a capacity that reaches over their change.
    """
    name = type(model).__name__
    _check_rotary(model.config.get_text_config(), name, capacity)
    try:
        where = first_mixing(build_small(shrink(model.config)))
    except Exception as error:  # whatever foreign model code raises
        rule = f"whether {name} keeps packed rows apart cannot be tried ({type(error).__name__}: {error})"
        raise ConfigError("data.packing = true", rule, "Use data.packing=false") from error
    if where:
        rule = f"{name} mixes rows that lie one behind the other: the first module that does is {where}"
        raise ConfigError("data.packing = true", rule, "Use data.packing=false, or data.group_by_length=true")


def _check_rotary(config: Any, name: str, capacity: int) -> None:
    """Refuse factors that the largest position of a micro-batch decides: padding counts on from packed rows.

    The small copy does not show it: it is shorter than the length at which the factors change.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (given, *given.values()):  # one for all blocks, or one for each kind of them
        if not isinstance(rope, dict):
            continue
        kind = str(rope.get("rope_type", rope.get("type", "")))
        if kind != "longrope" and "dynamic" not in kind:
            continue
        most = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        if most is not None and capacity > most:
            rule = (
                f"{name} has rope_type={kind}, whose factors are others above {most} positions "
                f"(original_max_position_embeddings), and packed rows may reach {capacity}"
            )
            raise ConfigError("data.packing = true", rule, f"Use data.max_length={most}, or data.packing=false")


@torch.no_grad()
def first_mixing(model: PreTrainedModel) -> str:
    """The first module whose result for packed rows is another than for each apart; empty where there is none.

    Args:
        model: small, with weights, in evaluation mode.
    """
    size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    length = sum(_PACKED[0])
    ids = torch.randint(min(_SPECIAL_IDS, size // 2), size, (len(_PACKED), length), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _PACKED])
    packed = _outputs(model, ids, positions)
    for row, lengths in enumerate(_PACKED):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for end, number in zip(ends, lengths, strict=True):
            apart = _outputs(model, ids[row : row + 1, end - number : end], torch.arange(number).unsqueeze(0))
            for name, alone in apart.items():
                together = packed.get(name)
                if together is None or together.shape[:2] != ids.shape:
                    continue
                if not _agree(together[row : row + 1, end - number : end], alone):
                    return f"{name} ({type(model.get_submodule(name)).__name__})" if name else type(model).__name__
    return ""


def _agree(together: torch.Tensor, alone: torch.Tensor) -> bool:
    if together.shape != alone.shape:
        return True  # no tensor of a row's tokens
    scale = float(alone.abs().max()) or 1.0
    return float((together - alone).abs().max()) <= _LIMIT * scale


def _outputs(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> Outputs:
    """What each module returns for ids [rows, length], where it is a tensor of them; the logits under no name."""
    found: Outputs = {}
    with _watched(model, found):
        found[""] = call_model(model, ids, positions)
    return found


@contextmanager
def _watched(model: nn.Module, found: Outputs) -> Iterator[None]:
    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            tensor = next(iter(out), None) if isinstance(out, Sequence) else out
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dim() > 2:
                found.setdefault(name, tensor)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
