"""What a causal language model is made of: embedding, blocks, head, ties."""

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
        tied: whether head and embedding are one parameter.
    """

    blocks: str
    num_blocks: int
    embedding: str
    head: str
    tied: bool


def find_structure(model: PreTrainedModel) -> Structure:
    """The structure of a model that has a token embedding, one list of blocks and a head.

    Raises:
        PlanError: the model has no single list of ``num_hidden_layers`` blocks, no embedding or no head.
    """
    names = {id(module): name for name, module in model.named_modules()}
    num_blocks = model.config.get_text_config().num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_blocks
        # Lists inside of a block (experts) may be as long.
        and not any(part.isdigit() for part in name.split("."))
    ]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if len(lists) != 1 or embedding is None or head is None:
        raise PlanError(
            type(model).__name__,
            f"expected one list of {num_blocks} blocks between an embedding and a head",
            "This architecture is not available in this version",
        )
    return Structure(
        blocks=lists[0],
        num_blocks=num_blocks,
        embedding=names[id(embedding)],
        head=names[id(head)],
        tied=head.weight is embedding.weight,
    )
