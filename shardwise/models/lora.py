"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), put into an unsplit model on meta by peft.

Names: inside, a base weight keeps the name that it has in its file (``q_proj.weight``), an adapter's are
``q_proj.lora_A.weight`` and ``q_proj.lora_B.weight``. A module of ``modules_to_save`` is trained in place:
its weights are those of the base model with gradients, no copy. A tied embedding stays tied, so naming one
end of it trains both.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.config import nearest
from shardwise.errors import ConfigError
from shardwise.models.init import Distribution
from shardwise.spec.run import LoraConfig
from shardwise.units import format_exact

ADAPTER = "default"  # peft's name of the one adapter
ALL_LINEAR = "all-linear"
_PARTS = re.compile(r"\.(lora_[AB])\." + ADAPTER + r"\.")
_MAX_LISTED = 12


@dataclass(frozen=True)
class Adapters:
    """What is added to a model and what of it trains; the same on every rank.

    Args:
        config: peft's configuration, as ``adapter_config.json`` holds it.
        targets: names of the modules that get an adapter.
        saved: names of the modules that are trained whole, ties included.
        shapes: shapes of the trainable parameters of the whole model, by parameter name; a tied one once.
        tied: further name -> name in ``shapes`` of a trained parameter that has two.
        num_parameters: parameters of the base model and of the adapters.
    """

    config: Any
    targets: tuple[str, ...]
    saved: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    num_parameters: int

    @property
    def num_trainable(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def distributions(self) -> dict[str, Distribution]:
        """Initial values of the adapters, as peft draws them: B zero, A uniform within 1/sqrt(inputs)."""
        return {
            name: Distribution(0.0, 0.0, bound=1.0 / math.sqrt(shape[1]) if ".lora_A." in name else 0.0)
            for name, shape in self.shapes.items()
            if is_adapter(name)
        }

    def __str__(self) -> str:
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in self.targets)
        saved = f", {', '.join(self.saved)} whole" if self.saved else ""
        return (
            f"rank {self.config.r}, alpha {format_exact(self.config.lora_alpha)}, {len(self.targets)} modules "
            f"({', '.join(kinds)}){saved}; {self.num_trainable:,} of {self.num_parameters:,} parameters train "
            f"({100 * self.num_trainable / self.num_parameters:.2f} %)"
        )


def plain_name(name: str) -> str:
    """The name of a module parameter without what peft's wrappers add to it."""
    return _PARTS.sub(r".\1.", name.replace(".base_layer.", "."))


def is_adapter(name: str) -> bool:
    """Whether a plain parameter name is that of an adapter, not of the base model."""
    return ".lora_A." in name or ".lora_B." in name


def find_adapters(model: PreTrainedModel, lora: LoraConfig) -> Adapters:
    """Where adapters go in ``model`` (on meta, not changed), and what they are.

    Raises:
        ConfigError: a name that matches no module, with the real names and the nearest; a module that
            cannot have an adapter, or is asked to have one and to be trained whole.
    """
    saved = _saved_modules(model, lora)
    targets = _target_modules(model, lora, saved)
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in targets:
        outputs, inputs = _features(model.get_submodule(name))
        shapes[f"{name}.lora_A.weight"] = (lora.r, inputs)
        shapes[f"{name}.lora_B.weight"] = (outputs, lora.r)
    num_adapter = sum(math.prod(shape) for shape in shapes.values())
    tied = {}
    for module_name in saved:
        for short, parameter in model.get_submodule(module_name).named_parameters(remove_duplicate=False):
            name, owner = f"{module_name}.{short}", names[id(parameter)]
            shapes[owner] = tuple(parameter.shape)
            if name != owner:
                tied[name] = owner
    return Adapters(
        config=_peft_config(model, lora, targets, saved),
        targets=targets,
        saved=saved,
        shapes=shapes,
        tied=tied,
        num_parameters=sum(parameter.numel() for parameter in parameters.values()) + num_adapter,
    )


def inject(model: PreTrainedModel, adapters: Adapters | None) -> None:
    """Put the adapters into ``model``, in place, and let nothing train but them and ``saved``; a no-op for None.

    All on meta and without initial values: those are drawn by name (:mod:`shardwise.models.init`).
    """
    if adapters is None:
        return
    from peft import inject_adapter_in_model  # seconds of import that only adapters need

    config = copy.deepcopy(adapters.config)
    # Module names in full: peft's own matching by endings and its copies of whole modules are left out.
    config.target_modules, config.modules_to_save = set(adapters.targets), None
    dtypes = {name: model.get_submodule(name).weight.dtype for name in adapters.targets}
    inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    for name, dtype in dtypes.items():
        layer = model.get_submodule(name)
        for part in (layer.lora_A, layer.lora_B):
            part.to(dtype)
    for name in adapters.saved:
        model.get_submodule(name).requires_grad_(True)
    trained = {plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapters.shapes), "what peft trains is not what was asked for"


def has_adapter(module: nn.Module) -> bool:
    """Whether peft wrapped this module."""
    return hasattr(module, "lora_A") and hasattr(module, "base_layer")


def _features(module: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear module."""
    outputs, inputs = module.weight.shape
    return (inputs, outputs) if isinstance(module, Conv1D) else (outputs, inputs)  # Conv1D holds the transpose


def _linear_names(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]


def _matches(entry: str, name: str) -> bool:
    return name == entry or name.endswith(f".{entry}")


def _kinds(names: list[str]) -> list[str]:
    """Last parts of module names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _saved_modules(model: PreTrainedModel, lora: LoraConfig) -> tuple[str, ...]:
    """Modules of ``modules_to_save`` in the model's order, and with a tied one its other end.

    As in peft an entry is the end of a name, so that ``norm`` means every norm of the usual models.
    """
    modules = dict(model.named_modules())
    holding = [
        name
        for name, module in modules.items()
        if name and not isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    found = set()
    for entry in lora.modules_to_save:
        matched = [name for name in holding if name.endswith(entry)]
        if not matched:
            raise _no_match("modules_to_save", entry, _kinds([name for name in holding if not name[-1].isdigit()]))
        found |= set(matched)
    trained = {id(p) for name in found for p in modules[name].parameters()}
    for name, module in modules.items():
        own = [id(p) for p in module.parameters(recurse=False)]
        inside = any(name == other or name.startswith(f"{other}.") for other in found)
        if own and trained.issuperset(own) and not inside:
            found.add(name)
    return tuple(name for name in modules if name in found)


def _target_modules(model: PreTrainedModel, lora: LoraConfig, saved: tuple[str, ...]) -> tuple[str, ...]:
    linear = _linear_names(model)
    whole = {name for name in linear for other in saved if name == other or name.startswith(f"{other}.")}
    wanted = lora.target_modules
    if wanted is None or (isinstance(wanted, str) and wanted.lower() == ALL_LINEAR):
        head = model.get_output_embeddings()
        names = [name for name in linear if model.get_submodule(name) is not head and name not in whole]
        if not names:
            raise ConfigError("lora.target_modules", "leaves no linear layer to adapt", "Shorten lora.modules_to_save")
        return tuple(names)
    everything = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for entry in [wanted] if isinstance(wanted, str) else wanted:
        if isinstance(wanted, str):
            matched = [name for name in everything if re.fullmatch(entry, name)]
        else:
            matched = [name for name in everything if _matches(entry, name)]
        if not matched:
            raise _no_match("target_modules", entry, _kinds(linear), is_pattern=isinstance(wanted, str))
        _check_targets(model, entry, matched, whole, _kinds(linear))
        found |= set(matched)
    return tuple(name for name in everything if name in found)


def _check_targets(model: nn.Module, entry: str, matched: list[str], whole: set[str], kinds: list[str]) -> None:
    for name in matched:
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear | Conv1D):
            remedy = f"Linear layers here: {', '.join(kinds)}"
            if isinstance(module, nn.Embedding):
                remedy += f"; lora.modules_to_save=[{name.rpartition('.')[2]}] trains the embedding whole"
            raise ConfigError(
                f"lora.target_modules = {entry!r}",
                f"matches {name}, a {type(module).__name__}; an adapter needs a linear layer",
                remedy,
            )
        if name in whole:
            rule = f"matches {name}, which lora.modules_to_save trains whole"
            raise ConfigError(f"lora.target_modules = {entry!r}", rule, "Leave it out of one of the two")


def _no_match(key: str, entry: str, kinds: list[str], *, is_pattern: bool = False) -> ConfigError:
    listed = ", ".join(kinds[:_MAX_LISTED]) + (", ..." if len(kinds) > _MAX_LISTED else "")
    remedy = f"Names here: {listed}"
    near = nearest(entry.rpartition(".")[2], kinds)
    if is_pattern and entry in kinds:
        remedy = f"A text is a pattern for the whole name: write [{entry}] or '.*\\.{entry}'. {remedy}"
    elif near is not None:
        remedy = f"Did you mean {near}? {remedy}"
    return ConfigError(f"lora.{key} = {entry!r}", "matches no module of the model", remedy)


def _peft_config(model: PreTrainedModel, lora: LoraConfig, targets: tuple[str, ...], saved: tuple[str, ...]) -> Any:
    """The configuration for plain peft: short names where they mean the same modules."""
    from peft import LoraConfig as PeftLoraConfig

    names = [name for name, _ in model.named_modules()]
    short = _kinds(list(targets))
    same = {name for name in names if any(_matches(kind, name) for kind in short)} == set(targets)
    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=short if same else list(targets),
        modules_to_save=_short_saved(names, saved) or None,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
    )


def _short_saved(names: list[str], saved: tuple[str, ...]) -> list[str]:
    short = _kinds(list(saved))
    same = {name for name in names if name.endswith(tuple(short))} == set(saved)
    return short if same else list(saved)
