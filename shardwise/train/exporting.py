"""A Hugging Face folder from a checkpoint, by one process on the CPU: parameter after parameter, never all at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.checkpoint.adapter import ADAPTER_FOLDER
from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import assign_files, tensor_bytes, write_headers, write_slices, writing
from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.listing import (
    CHECKPOINTS,
    MANIFEST_FILE,
    complete_checkpoints,
    fault_in,
    is_unlisted,
    passed_over,
    saved_state,
    step_of,
    told_of_unlisted,
)
from shardwise.checkpoint.merge import Comparison, compare_logits, logits_of, probe
from shardwise.checkpoint.naming import Naming, default_naming, naming_of_folder
from shardwise.checkpoint.reader import IndexReader
from shardwise.checkpoint.save_job import damage_in
from shardwise.checkpoint.store import SlicedTensor, load_checkpoint
from shardwise.errors import CheckpointError, ConfigError
from shardwise.log import say
from shardwise.models.build import build_on_meta, freeze_stored_buffers, put_head_last
from shardwise.models.shard import Shard
from shardwise.spec.layout import ParamLayout
from shardwise.train.setup import declared_dtype

_BATCH_BYTES = 2**28  # of parameters that are read at once; a larger one is read alone


def find_checkpoint(source: Path) -> Path:
    """The checkpoint that a path means: the folder itself (or a link to it), or the newest complete one of a run.

    One without a list of its files is taken where the path names it, as ``resume`` does.

    Which one is taken, and what was passed over for it, is said on stderr.

    Raises:
        ConfigError: there is none.
        CheckpointError: the path names a checkpoint that is not complete.
    """
    fault = fault_in(source)
    if not fault or is_unlisted(source):
        return source.resolve()
    if step_of(source.resolve()) is not None or (source / MANIFEST_FILE).exists():
        raise CheckpointError(str(source), f"not a complete checkpoint: {fault}", "Export another one")
    for folder in (source / CHECKPOINTS, source):
        found = next(iter(complete_checkpoints(folder)[::-1]), None)
        for note in passed_over(folder, found):
            say(f"passed over {note}")
        if found is not None:
            say(f"exporting {found}")
            return found
    rule = f"holds no complete checkpoint (looked in it, and for {CHECKPOINTS}/step-*)"
    raise ConfigError(str(source), rule, "Give a run's output folder, or a folder checkpoints/step-*")


def export_checkpoint(checkpoint: Path, out: Path, max_file_bytes: int | None = None) -> None:
    """Write the model of a checkpoint to ``out``; of a LoRA run its adapter.

    Memory: up to three times a parameter, or :data:`_BATCH_BYTES` of smaller ones.

    Nothing in ``out`` runs code when it is loaded.

    Args:
        out: a folder that is not there yet, or empty.
        max_file_bytes: of a weight file; None: the files of the model that was trained.

    Raises:
        ConfigError: an ``out`` with something in it.
        CheckpointError: the checkpoint is damaged, or lacks a parameter.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(str(out), "is not empty", "Name a folder that is not there yet")
    run = _saved_run(checkpoint)
    damage = damage_in(checkpoint)
    if damage:
        raise CheckpointError(str(checkpoint), f"is damaged: {damage}", "Export another one")
    if is_unlisted(checkpoint):
        say(told_of_unlisted(checkpoint))
    draft = out.absolute().with_name(f".{out.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    with writing(out):
        try:
            if run.get("lora") is not None:
                shutil.copytree(checkpoint / ADAPTER_FOLDER, draft)
            else:
                draft.mkdir(parents=True)
                Companions(checkpoint).copy_to(draft)
                _write_weights(checkpoint, draft, run, max_file_bytes)
            if out.exists():
                out.rmdir()
            draft.rename(out)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


def check_whole(checkpoint: Path, option: str) -> None:
    """Refuse an option of whole models for the checkpoint of a LoRA run.

    Raises:
        ConfigError: it holds an adapter.
    """
    if saved_state(checkpoint)["run"].get("lora") is not None:
        rule = "is for whole models, and this checkpoint holds an adapter"
        raise ConfigError(option, rule, "Leave it out, or use --merge, which compares logits before and after")


def verify_export(checkpoint: Path, out: Path) -> Comparison:
    """Logits of an export, by plain transformers, against the model with the checkpoint's own parameters.

    Memory: the model in fp32, once.
    """
    run = _saved_run(checkpoint)
    folder = _model_folder(checkpoint, run)
    stored = declared_dtype(folder)
    live: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    put_head_last(live)
    freeze_stored_buffers(live)
    for name, values in _parameters(checkpoint, folder, run, _shapes(live)):
        with torch.no_grad():
            live.get_parameter(name).copy_(values)
    ids = probe(live.config.get_text_config().vocab_size)
    before = logits_of(live.eval(), ids)
    del live
    return compare_logits(out, ids, before, stored)


def _write_weights(checkpoint: Path, draft: Path, run: Mapping[str, Any], max_file_bytes: int | None) -> None:
    folder = _model_folder(checkpoint, run)
    model = build_on_meta(folder, run.get("attn_implementation"))
    naming = _naming(folder, run, model)
    files = assign_files(naming.tensors, max_file_bytes)
    if max_file_bytes is not None:
        _check_file_size(naming, max_file_bytes)
    write_headers(draft, files, naming.tensors)
    for name, values in _parameters(checkpoint, folder, run, _shapes(model), naming):
        shard = Shard(ParamLayout(name, tuple(values.shape)), nn.Parameter(values, requires_grad=False))
        write_slices(draft, files, naming, [(name, shard)])


def _check_file_size(naming: Naming, max_file_bytes: int) -> None:
    name, tensor = max(naming.tensors.items(), key=lambda item: tensor_bytes(item[1]))
    if tensor_bytes(tensor) > max_file_bytes:
        rule = f"{name} alone has {tensor_bytes(tensor)} bytes"
        remedy = f"Use {-(-tensor_bytes(tensor) // 10**6)}MB at least"
        raise ConfigError(f"--max-shard-size {max_file_bytes}B", rule, remedy)


def _saved_run(checkpoint: Path) -> dict[str, Any]:
    """The run that saved, with its model as a path that holds from anywhere."""
    state = saved_state(checkpoint)
    run: dict[str, Any] = state["run"]
    return run | {"model": state.get("model_folder", run["model"])}


def _model_folder(checkpoint: Path, run: Mapping[str, Any]) -> Path:
    """The model that was trained, or where it has gone what the checkpoint keeps of it."""
    folder = Path(run["model"])
    return folder if (folder / "config.json").is_file() else checkpoint


def _naming(folder: Path, run: Mapping[str, Any], model: PreTrainedModel) -> Naming:
    """As the model's own files name the tensors; without them as transformers would."""
    if run.get("model_init") == "random" or not any(folder.glob("*.safetensors")):
        if run.get("model_init") != "random":
            say(f"no weights at {run['model']}: tensors are named as transformers does")
        return default_naming(model, declared_dtype(folder))
    return naming_of_folder(folder, model)


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _parameters(
    checkpoint: Path,
    folder: Path,
    run: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    naming: Naming | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter whole, in fp32: from the checkpoint, and what was not trained from the model's folder."""
    saved = IndexReader(checkpoint).read_metadata().state_dict_metadata
    for names in _batches({name: shape for name, shape in shapes.items() if f"model.{name}" in saved}):
        values = {name: torch.empty(shapes[name]) for name in names}
        layouts = {name: ParamLayout(name, shapes[name]) for name in names}
        tensors = {f"model.{name}": SlicedTensor.of(values[name], layouts[name]) for name in names}
        load_checkpoint(checkpoint, tensors, alone=True)
        yield from values.items()
    frozen = [name for name in shapes if f"model.{name}" not in saved]
    if frozen and (folder == checkpoint or run.get("model_init") == "random"):
        rule = f"it does not hold {frozen[0]}, which was not trained, and the model that does is not at {run['model']}"
        raise CheckpointError(str(checkpoint), rule, "Put the model back where it was")
    if frozen and naming is None:
        naming = naming_of_folder(folder, build_on_meta(folder, run.get("attn_implementation")))
    for name in frozen:
        values_of = nn.Parameter(torch.empty(shapes[name]), requires_grad=False)
        assert naming is not None
        load_slices(folder, [Shard(ParamLayout(name, shapes[name]), values_of)], naming)
        yield name, values_of.detach()


def _batches(shapes: Mapping[str, tuple[int, ...]]) -> Iterable[list[str]]:
    """Names of parameters that fit into :data:`_BATCH_BYTES` together, in fp32."""
    batch: list[str] = []
    size = 0
    for name, shape in shapes.items():
        num_bytes = 4 * torch.Size(shape).numel()
        if batch and size + num_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += num_bytes
    if batch:
        yield batch
