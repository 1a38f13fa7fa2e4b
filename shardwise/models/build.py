"""A Hugging Face model on the meta device: its modules and shapes without a byte of weights."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwise.errors import ConfigError, PlanError


def build_on_meta(
    model_dir: Path, attn_implementation: str | None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model of a folder's ``config.json``, all parameters and buffers on ``meta``, in training mode.

    Args:
        attn_implementation: ``sdpa`` or ``eager``; None: the first of them that the model has.

    Raises:
        ConfigError: transformers knows no causal language model of this type, cannot read the configuration,
            or the model lacks that kind of attention.
    """
    value = f"{model_dir / 'config.json'}"
    try:
        config = AutoConfig.from_pretrained(model_dir)
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(value, f"transformers cannot read it ({error})", "Correct the file") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        rule = f"transformers has no causal language model of type {config.model_type!r}"
        raise ConfigError(value, rule, "Use a model that generates text")
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if attn_implementation is not None and "attention implementation" in str(error):
            rule = f"{config.model_type} does not have it in transformers"
            raise ConfigError(f"attn_implementation = {attn_implementation!r}", rule, "Leave it out") from error
        raise ConfigError(value, f"transformers cannot build this model ({error})", "Correct the file") from error
    arrange(model)
    freeze_stored_buffers(model)
    keep_in_fp32(model)
    return model.train()


def arrange(model: PreTrainedModel) -> None:
    """Give a model the form in which a run has it: experts as they are split, the head last, one embedding."""
    choose_experts(model)
    put_head_last(model)
    unite_embedding(model)


def causal_model(config: Any, **options: Any) -> PreTrainedModel:
    """The causal language model of ``config``, which may be that of a model, or of a file.

    Some classes keep the text part of a file's configuration as their own, and transformers' auto class knows the
    whole one alone. Then the class stands in the same package as the part's.

    Args:
        options: of transformers' ``from_config``.
    """
    model: PreTrainedModel
    package = type(config).__module__.rpartition(".")[0]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and package:
        names = [n for v in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for n in ((v,) if isinstance(v, str) else v)]
        for found in (getattr(import_module(package), name, None) for name in names):
            if found is not None and found.config_class is type(config):
                model = found._from_config(config, **options)
                return model
    model = AutoModelForCausalLM.from_config(config, **options)
    return model


def choose_experts(model: PreTrainedModel) -> None:
    """On a CPU the loop over experts: each computes its own tokens, where a batched product gathers whole weights."""
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")


def widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store in ``dtype``, where that is float64, what some models keep in fp32 (routers), so that nothing rounds."""
    if dtype is torch.float64:
        for parameter in model.parameters():
            if parameter.dtype is torch.float32:
                parameter.data = parameter.data.double()


def put_head_last(model: PreTrainedModel) -> None:
    """Name a tied weight by its embedding, as files do: some models register their head before it."""
    head = model.get_output_embeddings()
    for name, child in list(model.named_children()):
        if head is not None and any(module is head for module in child.modules()) and child is not model.base_model:
            model._modules[name] = model._modules.pop(name)


def unite_embedding(model: PreTrainedModel) -> None:
    """Make one module of those that look up the same weight: some classes have a second one that files name it by.

    So the part that holds the weight is the part that runs, and one stand-in takes its place on other stages.
    """
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return
    weight = getattr(embedding, "weight", None)
    if weight is None:
        return
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            same = type(child) is type(embedding) and getattr(child, "weight", None) is weight
            if same and child.extra_repr() == embedding.extra_repr():
                module._modules[name] = embedding


def freeze_stored_buffers(model: nn.Module) -> None:
    """Make parameters that are not trained of the buffers that files hold (a router's correction of its scores).

    So they are read, split, kept and written as what else the files hold. Of whole numbers only int64 is (a table of
    the experts of each token): others, in which files keep quantised weights, stay buffers.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            is_kept = buffer.is_floating_point() or buffer.dtype is torch.int64
            if name not in module._non_persistent_buffers_set and is_kept:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def keep_in_fp32(model: PreTrainedModel) -> None:
    """Leave in fp32 what the model's class names as never coarser (a router's weight), as ``from_pretrained`` does."""
    patterns = list(model._get_dtype_plan(model.dtype))
    if patterns:
        alternatives, _, _ = build_glob_alternation(patterns)
        for name, parameter in model.named_parameters():
            if alternatives.search(name):
                parameter.data = parameter.data.float()  # in place: ties stay ties


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer of ``module`` memory on ``device``, uninitialised; ties stay ties."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((child, name))
    module.to_empty(device=device)  # gives each place of a shared parameter a tensor of its own
    for (owner, owner_name), *copies in places.values():
        for child, name in copies:
            child._parameters[name] = owner._parameters[owner_name]


@torch.no_grad()
def recompute_buffers(model: PreTrainedModel) -> None:
    """Fill the buffers that no file holds (rotary frequencies) by the model's own initialisation.

    ``to_empty`` leaves them as garbage. They are set to NaN first, so that one that the model does
    not fill is found here and not in the loss. Parameters beside them keep their values.

    Raises:
        PlanError: a buffer that the model's initialisation leaves unset.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers' own mark: its initialisation leaves it alone
    every = list(initialised_modules(model))
    for owner, name, module in every:
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        stored = sorted(set(buffers) - module._non_persistent_buffers_set)
        if stored:
            rule = f"files hold {buffers[stored[0]].dtype} in it, and only weights and int64 are read and saved"
            raise _refused(f"{name}.{stored[0]}", rule)
        for buffer in buffers.values():
            buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer.zero_()
        owner._init_weights(module)
    unset = _unset_buffers(model)
    for owner, name, module in every if unset else []:
        if any(f".{buffer}".startswith(f".{name}.") for buffer in unset) or not name:
            owner._init_weights(module)  # it may fill those of the modules in it
            unset = _unset_buffers(model)
        if not unset:
            break
    if unset:
        raise _refused(unset[0], "no file holds it and the model's own initialisation does not fill it")


def _unset_buffers(model: nn.Module) -> list[str]:
    """Names of the buffers that nothing has filled yet."""
    return [n for n, buffer in model.named_buffers() if buffer.is_floating_point() and bool(buffer.isnan().any())]


def initialised_modules(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, str, nn.Module]]:
    """All modules by name, children first, each with the model whose ``_init_weights`` transformers calls for it.

    That is the innermost model that it is a part of: it may know classes, and read attributes, that others do not.
    """
    yield from _initialised(model, model, "")


def _initialised(
    owner: PreTrainedModel, module: nn.Module, name: str
) -> Iterator[tuple[PreTrainedModel, str, nn.Module]]:
    for key, child in module.named_children():
        of_child = child if isinstance(child, PreTrainedModel) else owner
        yield from _initialised(of_child, child, f"{name}.{key}" if name else key)
    yield owner, name, module


def _refused(buffer: str, rule: str) -> PlanError:
    return PlanError(f"buffer {buffer}", rule, "This architecture is not available in this version")
