"""What Hugging Face's Trainer lets decay, by its own rule, as far as it is a matrix."""

from __future__ import annotations

from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

# As in transformers.Trainer.get_decay_parameter_names, which needs a Trainer.
_PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def decaying(model: nn.Module) -> set[str]:
    """Names of the parameters that decay."""
    theirs = set(get_parameter_names(model, [nn.LayerNorm], _PATTERNS))
    return {name for name, parameter in model.named_parameters() if name in theirs and parameter.dim() > 1}
