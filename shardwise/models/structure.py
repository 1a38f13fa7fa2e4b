"""What a causal language model is made of: embedding, blocks, what follows them, head, ties."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError


@dataclass(frozen=True)
class Structure:
    """Module names of the parts of a model.

    Args:
        blocks: name of the list of decoder layers (``model.layers``).
        num_blocks: its length.
        embedding: the token embedding.
        head: the projection onto the vocabulary.
        after: what stands between the last block and the head (final norm).
        tied: whether head and embedding are one parameter.
    """

    blocks: str
    num_blocks: int
    embedding: str
    head: str
    after: tuple[str, ...]
    tied: bool


def find_structure(model: PreTrainedModel) -> Structure:
    """The structure of a model whose base is: embedding, a list of blocks, a final norm.

    Raises:
        PlanError: the base model has no single list of ``num_hidden_layers`` blocks.
    """
    names = {id(module): name for name, module in model.named_modules()}
    base = model.base_model
    base_name = names[id(base)]
    children = [(f"{base_name}.{name}", child) for name, child in base.named_children()]
    num_blocks = model.config.get_text_config().num_hidden_layers
    lists = [
        i for i, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList) and len(child) == num_blocks
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if len(lists) != 1 or embedding is None or head is None:
        raise PlanError(
            type(model).__name__,
            f"expected one list of {num_blocks} blocks between an embedding and a head",
            "This architecture is not available in this version",
        )
    after = tuple(name for name, child in children[lists[0] + 1 :] if any(True for _ in child.parameters()))
    return Structure(
        blocks=children[lists[0]][0],
        num_blocks=num_blocks,
        embedding=names[id(embedding)],
        head=names[id(head)],
        after=after,
        tied=head.weight is embedding.weight,
    )
