"""What a causal language model is made of: embedding, blocks, head, ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.models.kinds import block_signatures, number_kinds
from shardwise.models.trace import called_modules


@dataclass(frozen=True)
class Structure:
    """Module names of the parts of a model.

    Args:
        blocks: name of the list of decoder layers (``model.layers``).
        num_blocks: its length.
        embedding: the token embedding.
        head: the projection onto the vocabulary.
        tied: whether head and embedding are one parameter.
        kinds: a number for each block; blocks of one number have the same modules, shapes and settings.
    """

    blocks: str
    num_blocks: int
    embedding: str
    head: str
    tied: bool
    kinds: tuple[int, ...] = ()


def find_structure(model: nn.Module, like: Structure | None = None) -> Structure:
    """The structure of a model that has a token embedding, one list of blocks and a head.

    Args:
        like: that of a smaller copy of the same class, whose blocks have the same name: a pass of all layers, in which
            it would be found, may take seconds.

    Raises:
        PlanError: the model has no list of blocks, no embedding or no head.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = like.blocks if like is not None else find_blocks(model)
    embedding, head = find_ends(model)
    if blocks is None or embedding is None or head is None:
        missing = "list of blocks" if blocks is None else "token embedding" if embedding is None else "head"
        rule = f"has no {missing} that can be told from its modules"
        raise PlanError(type(model).__name__, rule, "This architecture is not available in this version")
    children = list(model.get_submodule(blocks))  # type: ignore[call-overload]
    return Structure(
        blocks=blocks,
        num_blocks=len(children),
        embedding=names[id(embedding)],
        head=names[id(head)],
        tied=getattr(head, "weight", None) is getattr(embedding, "weight", head),
        kinds=number_kinds(block_signatures(children, text_config(model))),
    )


def text_config(model: nn.Module) -> Any:
    """The configuration of the language part of a Hugging Face model; None for a plain module."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None


def find_blocks(model: nn.Module) -> str | None:
    """Name of the list of blocks: the one that the configuration gives the length of.

    Where several lists are as long, or none is, those that run in a pass over token ids count, and of them the one
    with the most parameters. Lists inside of a block (experts) are no candidates.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if name
        and isinstance(module, nn.ModuleList | nn.Sequential)
        and not any(part.isdigit() for part in name.split("."))
        and next(module.parameters(), None) is not None
    }
    expected = getattr(text_config(model), "num_hidden_layers", None)
    right = [name for name, module in lists.items() if len(module) == expected]
    if len(right) == 1:
        return right[0]
    candidates = _running(model, lists, right) or _running(model, lists, list(lists)) or right or list(lists)
    return max(candidates, key=lambda name: sum(p.numel() for p in lists[name].parameters()), default=None)


def _running(model: nn.Module, lists: dict[str, Any], names: list[str]) -> list[str]:
    """Those lists of which the first module runs; none where the pass cannot be traced."""
    if len(names) < 2:
        return []
    try:
        called = called_modules(model, [f"{name}.0" for name in names])
    except Exception:  # whatever a foreign forward raises: then the names and sizes must do
        return []
    return [name for name in names if f"{name}.0" in called]


def find_ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The token embedding and the head: as a Hugging Face model names them, else the largest embedding outside of the
    blocks and the linear layer outside of them with as many features; None where there is none."""
    ends = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            ends.append(getattr(model, getter)())
        except (AttributeError, NotImplementedError):
            ends.append(None)
    outside = [m for name, m in model.named_modules() if not any(part.isdigit() for part in name.split("."))]
    if ends[0] is None:
        embeddings = [m for m in outside if isinstance(m, nn.Embedding)]
        ends[0] = max(embeddings, key=lambda m: m.num_embeddings, default=None)
    if ends[1] is None and isinstance(ends[0], nn.Embedding):
        size = ends[0].num_embeddings
        ends[1] = next((m for m in outside if isinstance(m, nn.Linear) and m.out_features == size), None)
    return ends[0], ends[1]


def num_predicted(model: nn.Module) -> int | None:
    """Ids that a model predicts, where its head says so: some embeddings have a few more, to be of a round size."""
    return getattr(find_ends(model)[1], "out_features", None)
