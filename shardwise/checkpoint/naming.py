"""From the names and shapes of Hugging Face files to those of the modules, by transformers' own conversion.

Files and modules differ for some families: a head has another name, experts lie one by one where the module
holds them stacked. What transformers does to whole tensors is run here on stand-ins, which gives for each
parameter the boxes of file tensors that it is made of: read by it, and written back by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping

from shardwise.checkpoint.compose import Composed, Part
from shardwise.checkpoint.safetensors import TensorFolder
from shardwise.errors import CheckpointError

_REMEDY = "Use the config.json that belongs to the weights"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a Hugging Face folder: ``file`` is its file's name, None where it is not yet assigned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str | None = None


@dataclass(frozen=True)
class Naming:
    """How a model's parameters lie in the files of a folder.

    Args:
        tensors: every tensor of the files that belongs to a parameter, in their order.
        parts: parameter name -> the boxes that it consists of. A tied weight that the files hold twice has two
            sets of boxes, each covering it.
        ignored: patterns of further tensors that the files may hold and no module reads.
    """

    tensors: Mapping[str, StoredTensor]
    parts: Mapping[str, Sequence[Part]]
    ignored: tuple[str, ...] = ()


def naming_of_folder(folder: Path, model: PreTrainedModel) -> Naming:
    """The naming of the weights in ``folder``, read from the headers of its files.

    Args:
        model: the whole model, on meta, before any split.

    Raises:
        CheckpointError: a parameter without a tensor, a tensor without a parameter, another shape, or a
            conversion that cannot be done slice by slice.
    """
    ignored = ignored_names(model)
    stored = TensorFolder(folder, ignored).entries
    tensors = {name: StoredTensor(entry.shape, entry.dtype, entry.file.name) for name, entry in stored.items()}
    parts = _compose(model, tensors, str(folder))
    _check_kinds(model, tensors, parts, str(folder))
    read = {part.name for found in parts.values() for part in found}
    return Naming({name: tensor for name, tensor in tensors.items() if name in read}, parts, ignored)


def default_naming(model: PreTrainedModel, dtype: torch.dtype) -> Naming:
    """The naming that transformers' ``save_pretrained`` would give the model, all tensors in ``dtype``."""
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = loading.revert_weight_conversion(model, state)
    tensors = {
        name: StoredTensor(tuple(tensor.shape), dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in saved.items()
    }
    return Naming(tensors, _compose(model, tensors, type(model).__name__))


def plain_naming(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Naming:
    """Each parameter as one tensor of its own name."""
    tensors = {name: StoredTensor(shape, dtype) for name, shape in shapes.items()}
    return Naming(tensors, {name: Composed.whole(name, shape).parts for name, shape in shapes.items()})


def ignored_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Patterns of tensors that old files hold and no module reads: masks, rotary frequencies."""
    return (*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq")


def _compose(model: PreTrainedModel, tensors: Mapping[str, StoredTensor], where: str) -> dict[str, list[Part]]:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    targets = _by_target(model, tensors, where)
    aliases = _aliases(model)
    parts: dict[str, list[Part]] = {}
    for target, transform in targets.items():
        try:
            converted = transform.convert(target, model=model, config=model.config)
        except (NotImplementedError, RuntimeError, ValueError, loading.SkipParameters) as error:
            rule = f"its conversion to {target} cannot be done slice by slice ({error})"
            raise CheckpointError(where, rule, "This architecture is not available in this version") from error
        for name, value in converted.items():
            composed = value[0] if isinstance(value, list) else value
            owner = aliases.get(name, name)
            if owner not in shapes:
                raise CheckpointError(where, f"{name} has no parameter", _REMEDY)
            if tuple(composed.shape) != shapes[owner]:
                rule = f"{name} has shape {tuple(composed.shape)}, and the model of config.json {shapes[owner]}"
                raise CheckpointError(where, rule, _REMEDY)
            parts.setdefault(owner, []).extend(composed.parts)
    missing = sorted(set(shapes) - set(parts))
    if missing:
        raise CheckpointError(where, f"no tensor for {len(missing)} parameters, such as {missing[0]}", _REMEDY)
    return parts


def _check_kinds(
    model: PreTrainedModel, tensors: Mapping[str, StoredTensor], parts: Mapping[str, Sequence[Part]], where: str
) -> None:
    """Refuse whole numbers in the place of weights (quantised ones), and the other way round."""
    for name, parameter in model.named_parameters():
        for part in parts[name]:
            stored = tensors[part.name].dtype
            if stored.is_floating_point != parameter.is_floating_point():
                rule = f"{part.name} is {stored}, and the model holds {parameter.dtype} there"
                raise CheckpointError(where, rule, "Use weights that are not quantised")


def _aliases(model: PreTrainedModel) -> dict[str, str]:
    """Further name of a tied parameter -> the name that it goes by."""
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: owners[id(parameter)] for name, parameter in every if owners[id(parameter)] != name}


def _by_target(
    model: PreTrainedModel, tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, loading.WeightTransform]:
    """First parameter of each conversion -> the conversion, holding stand-ins for the tensors it takes."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, loading.WeightTransform] = {}
    unknown = []
    for name in sorted(tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # already a module's name
            target, pattern = name, None
        if target not in state:
            unknown.append(name)
            continue
        new = loading.WeightRenaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
        transform = found.setdefault(target, new)
        transform.add_tensor(target, name, pattern or name, Composed.whole(name, tensors[name].shape))
    ignored = ignored_names(model)
    unknown = [name for name in unknown if not any(re.search(pattern, name) for pattern in ignored)]
    if unknown:
        raise CheckpointError(where, f"{len(unknown)} tensors have no parameter, such as {unknown[0]}", _REMEDY)
    return found
