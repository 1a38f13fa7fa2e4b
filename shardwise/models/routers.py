"""The routers of a model with experts, as transformers' own recording of their logits names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from shardwise.errors import PlanError
from shardwise.spec.counts import EXPERTS_PER_TOKEN

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True)
class Routers:
    """What an auxiliary balance loss needs to know of a whole model.

    Args:
        modules: names of the routers, one for each block with experts.
        output: index of the logits in what a router returns.
        top_k: experts that a token is sent to.
        coefficient: ``router_aux_loss_coef``.
    """

    modules: tuple[str, ...]
    output: int
    top_k: int
    coefficient: float


def take_routers(model: PreTrainedModel) -> Routers | None:
    """Take the balance loss off a model: its routers, None where its configuration does not ask for the loss.

    As with Hugging Face's Trainer the loss is part of the training loss where ``output_router_logits`` is
    true, which it is not by default. The flag is taken off the model: the loss is computed outside of it.

    Raises:
        PlanError: the loss is asked for, and transformers does not say where the router logits are, or the
            configuration how many experts a token is sent to; or another loss is, that of the logits' size.
    """
    config = model.config.get_text_config()
    _refuse_logit_loss(config, type(model).__name__)
    if not getattr(config, "output_router_logits", False):
        return None
    config.output_router_logits = False
    coefficient = next((getattr(config, name) for name in _COEFFICIENTS if getattr(config, name, None)), 0.0)
    if not coefficient:
        return None
    recorder = _recorder(model)
    if recorder is None or recorder.target_class is None:
        rule = f"transformers does not say where the router logits of {type(model).__name__} are"
        raise PlanError("config.json: output_router_logits = true", rule, "Set it to false")
    names = [name for name, module in model.named_modules() if isinstance(module, recorder.target_class)]
    top_k = next((getattr(config, name) for name in EXPERTS_PER_TOKEN if getattr(config, name, None)), None)
    if top_k is None:
        rule = f"its balance loss needs the experts of a token, and there is none of {', '.join(EXPERTS_PER_TOKEN)}"
        raise PlanError("config.json: output_router_logits = true", rule, "Set it to false")
    return Routers(tuple(names), recorder.index, top_k, coefficient)


def _refuse_logit_loss(config: Any, name: str) -> None:
    """A model may add to its loss the squared logarithm of what its softmax divides by; here it would be left out."""
    for key, value in config.to_dict().items():
        if "z_loss" in key and isinstance(value, int | float) and value > 0:
            rule = f"{name} adds a loss of its logits' size, which is not available in this version"
            raise PlanError(f"config.json: {key} = {value}", rule, "Set it to 0")


def _recorder(model: PreTrainedModel) -> OutputRecorder | None:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            found = (module._can_record_outputs or {}).get("router_logits")
            if isinstance(found, list | tuple):
                found = found[0] if len(found) == 1 else None
            if found is not None:
                return found if isinstance(found, OutputRecorder) else OutputRecorder(found)
    return None
