"""The costs of a decoder from its sizes alone, for models that nobody traced: published runs, first guesses.

Elements are counted operator by operator, for a pre-norm decoder block whose products are separate kernels:
Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for what is saved; the same operators for what they read
and write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.spec.block import (
    RECOMPUTE_LEVELS,
    Amount,
    Attention,
    Collective,
    ModelCosts,
    Parameters,
    PartCosts,
    Product,
    RecomputeLevel,
    TensorSplit,
)


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): ranks of the compressed query and key/value."""

    query_rank: int = 1536
    kv_rank: int = 512
    rope_dim: int = 64


@dataclass(frozen=True)
class Experts:
    """Routed experts of a block: ``chosen`` of ``number`` of width ``ffn`` for each token, and a shared one."""

    number: int
    chosen: int
    ffn: int
    shared_ffn: int = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Args:
        num_dense: first blocks without experts, where ``experts`` is given.
        window: positions that a token sees; 0: all before it.
        eager: attention writes its scores to memory, with dropout.
        bias: a fused kernel of attention is given a bias for each head and pair of positions, which each block keeps.
        dropout: the residual stream has dropout, as early GPTs.
        more_blocks: further blocks on the last stage that predict a second token.
        fused_gate: the activation function and the product with its gate are one kernel, which keeps no result between.
        dropped: what is not kept for the backward pass although nothing else is recomputed: ``norms`` ``activation``
            (results of the activation function) ``experts`` (all inside of them) ``attention`` (swapped to the host)
            ``logits`` (a loss that never holds them).
    """

    name: str
    num_blocks: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: Experts | None = None
    num_dense: int = 0
    latent: Latent | None = None
    window: int = 0
    eager: bool = False
    bias: bool = False
    dropout: bool = False
    positions: int = 0
    more_blocks: int = 0
    fused_gate: bool = True
    dropped: frozenset[str] = frozenset()


def model_costs(shape: Shape, degrees: Iterable[int] = (1, 2, 4, 8, 16, 32, 64)) -> ModelCosts:
    """The costs of a model; ``degrees`` are the tensor degrees to look at."""
    looked_at = tuple(degrees)
    dense = _block(shape, None, looked_at)
    if shape.experts is None:
        kinds: tuple[PartCosts, ...] = (dense,)
    else:
        kinds = (dense, _block(shape, shape.experts, looked_at))
    num_dense = shape.num_blocks if shape.experts is None else shape.num_dense
    order = tuple(0 if index < num_dense else 1 for index in range(shape.num_blocks))
    embedding, head = _ends(shape, looked_at)
    return ModelCosts(
        name=shape.name,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        kinds=kinds,
        order=order,
        embedding=embedding,
        head=head,
        tied=shape.tied,
        tied_parameters=shape.vocab * shape.hidden if shape.tied else 0,
        num_experts=shape.experts.number if shape.experts else 0,
        more=(kinds[-1], head) * shape.more_blocks,
    )


def _block(shape: Shape, experts: Experts | None, degrees: tuple[int, ...]) -> PartCosts:
    attention, products, whole = _attention(shape)
    more, feed_saved, feed_traffic, chosen = _feed_forward(shape, experts)
    hidden, width = shape.hidden, shape.heads * attention.v_dim
    queries = shape.heads * attention.qk_dim
    keys = shape.kv_heads * (attention.qk_dim + attention.v_dim)
    norms = 2 * hidden * (1 if shape.gated else 2)
    masks = 2.0 * hidden if shape.dropout else 0.0
    scores = shape.heads if shape.eager else 0
    # norm 1, the input of q/k/v, norm 2, the input of the feed-forward part; of the latent, its two vectors.
    # The core saves q, k, v and its output (and each head's fp32 normaliser, or scores after softmax and dropout).
    saved = Amount(
        split=0 if "attention" in shape.dropped else queries + keys + width,
        whole=(2 if "norms" in shape.dropped else 4) * hidden + whole,
        whole_bytes=masks,
        split_bytes=4 * shape.heads,
        split_growing=2 * scores + (shape.heads if shape.bias else 0),
        split_growing_bytes=scores,
    )
    cheap = Amount(split=queries + keys + width, whole=2 * hidden + whole, split_bytes=4 * shape.heads)
    levels: dict[RecomputeLevel, Amount] = {
        "none": saved + feed_saved,
        "selective": (saved if not shape.eager else _without_growth(saved)) + feed_saved
        if shape.eager
        else cheap + _products_only(feed_saved, shape, experts),
        "full": Amount(whole=hidden),
    }
    # 2 norms, 2 residual sums; rotary embedding of queries and keys; softmax and dropout of eager scores.
    forward = Amount(
        whole=10 * hidden + 2 * whole,
        whole_bytes=masks,
        split=2 * (queries + keys),
        split_growing=6 * scores,
        split_growing_bytes=scores,
    )
    backward = Amount(
        whole=14 * hidden + 3 * whole,
        whole_bytes=masks,
        split=2 * (queries + keys),
        split_growing=8 * scores,
        split_growing_bytes=scores,
    )
    everything = _parameters([*products, *more], norms)
    return PartCosts(
        name="experts" if experts else "dense",
        parameters=everything,
        trainable=everything,
        products=(*products, *more),
        attention=attention,
        forward_traffic=forward + feed_traffic,
        backward_traffic=backward + _doubled(feed_traffic),
        saved=levels,
        operators=18 + len(products) + len(more) + (12 if experts else 0) + (16 if shape.eager else 0),
        degrees=tuple(_tensor_split(shape, degree, hidden) for degree in degrees),
        dispatched=chosen * hidden,
    )


def _attention(shape: Shape) -> tuple[Attention, list[Product], int]:
    """The core, its products, and the elements of a token that no rank cuts."""
    hidden, heads = shape.hidden, shape.heads
    kernel: Literal["eager", "fused"] = "eager" if shape.eager else "fused"
    if shape.latent is None:
        core = Attention(heads, shape.kv_heads, shape.head_dim, shape.head_dim, shape.window, kernel)
        widths = (heads + 2 * shape.kv_heads) * shape.head_dim
        products = [
            Product("query_key_value", hidden, widths, "outer"),
            Product("attention_output", heads * shape.head_dim, hidden, "inner"),
        ]
        return core, products, 0
    latent = shape.latent
    core = Attention(heads, heads, shape.head_dim + latent.rope_dim, shape.head_dim, shape.window, kernel)
    down = [Product("kv_down", hidden, latent.kv_rank + latent.rope_dim)]
    query_inner = hidden
    if latent.query_rank:
        down.append(Product("query_down", hidden, latent.query_rank))
        query_inner = latent.query_rank
    products = [
        *down,
        Product("query_up", query_inner, heads * core.qk_dim, "outer"),
        Product("kv_up", latent.kv_rank, heads * 2 * shape.head_dim, "outer"),
        Product("attention_output", heads * shape.head_dim, hidden, "inner"),
    ]
    return core, products, 2 * (latent.kv_rank + latent.query_rank) + latent.rope_dim


def _feed_forward(shape: Shape, experts: Experts | None) -> tuple[list[Product], Amount, Amount, int]:
    """Products, what is saved, what is read and written forward, and experts that a token goes to."""
    hidden, up = shape.hidden, 2 if shape.gated else 1
    kept = up if "activation" in shape.dropped else up + 1
    kept += int(shape.gated and not shape.fused_gate)
    if experts is None:
        products = [
            Product("up", hidden, up * shape.ffn, "outer"),
            Product("down", shape.ffn, hidden, "inner"),
        ]
        inner = (up + 1) * shape.ffn
        return products, Amount(split=kept * shape.ffn), Amount(split=inner), 0
    chosen, inner = experts.chosen, (up + 1) * experts.ffn
    products = [
        Product("router", hidden, experts.number),
        Product("experts_up", hidden, up * experts.ffn, "outer", chosen, experts.number),
        Product("experts_down", experts.ffn, hidden, "inner", chosen, experts.number),
    ]
    # Tokens are gathered in the order of their experts before, and put back after.
    saved = Amount(expert=chosen * kept * experts.ffn, routed=2 * chosen * hidden, whole_bytes=8 * experts.number)
    if "experts" in shape.dropped:
        saved = Amount(routed=chosen * hidden, whole_bytes=8 * experts.number)
    traffic = Amount(expert=chosen * inner, routed=6 * chosen * hidden, whole_bytes=24 * experts.number)
    if experts.shared_ffn:
        products += [
            Product("shared_up", hidden, up * experts.shared_ffn, "outer"),
            Product("shared_down", experts.shared_ffn, hidden, "inner"),
        ]
        shared = Amount(split=(up + 1) * experts.shared_ffn)
        saved = saved + Amount(split=kept * experts.shared_ffn)
        traffic = traffic + shared + Amount(whole=3 * hidden)
    return products, saved, traffic, chosen


def _products_only(feed_saved: Amount, shape: Shape, experts: Experts | None) -> Amount:
    """What is left to keep where only the results of products are: no activation functions."""
    share = (2 if shape.gated else 1) / (3 if shape.gated else 2)
    return replace(feed_saved, split=feed_saved.split * share, expert=feed_saved.expert * share)


def _without_growth(amount: Amount) -> Amount:
    return Amount(
        split=amount.split, whole=amount.whole, split_bytes=amount.split_bytes, whole_bytes=amount.whole_bytes
    )


def _doubled(amount: Amount) -> Amount:
    return amount + amount


def _parameters(products: list[Product], norms: int) -> Parameters:
    sizes = [(product, product.inner * product.outer * product.copies) for product in products]
    return Parameters(
        split=sum(size for product, size in sizes if product.split != "none" and product.copies == 1),
        whole=norms + sum(size for product, size in sizes if product.split == "none"),
        expert=sum(size for product, size in sizes if product.copies > 1),
    )


def _tensor_split(shape: Shape, degree: int, elements: int) -> TensorSplit:
    """Megatron's split (Shoeybi et al. 2019, arXiv:1909.08053): one reduce after attention, one after the rest."""
    if shape.heads % degree:
        return TensorSplit(degree, f"does not divide the {shape.heads} attention heads")
    if shape.kv_heads % degree and degree % shape.kv_heads:
        return TensorSplit(degree, f"neither divides the {shape.kv_heads} KV heads nor is a multiple of them")
    if degree == 1:
        return TensorSplit(1, sequence=())
    reduce = Collective("all_reduce", elements, 2, 2)
    # Under sequence parallel the gathered inputs are not kept, and are gathered again for the weights' gradients.
    sequence = (Collective("all_gather", elements, 2, 4), Collective("reduce_scatter", elements, 2, 2))
    return TensorSplit(degree, collectives=(reduce,), sequence=sequence)


def _ends(shape: Shape, degrees: tuple[int, ...]) -> tuple[PartCosts, PartCosts]:
    hidden, vocab = shape.hidden, shape.vocab
    table = Parameters(split=vocab * hidden, whole=shape.positions * hidden)
    embedding = PartCosts(
        name="embedding",
        parameters=table,
        trainable=table,
        forward_traffic=Amount(whole=3 * hidden),
        backward_traffic=Amount(whole=4 * hidden),
        saved=dict.fromkeys(RECOMPUTE_LEVELS, Amount(whole_bytes=8 + (hidden if shape.dropout else 0))),
        operators=4,
        degrees=tuple(_end_split(shape, degree, 1, 0) for degree in degrees),
    )
    own = Parameters(split=0 if shape.tied else vocab * hidden, whole=hidden * (1 if shape.gated else 2))
    # Logits in the compute precision; the loss reads them, keeps its softmax in fp32 and writes their gradient.
    kept = 0 if "logits" in shape.dropped else vocab
    logits = Amount(split=kept, split_bytes=4 * kept, whole=2 * hidden)
    head = PartCosts(
        name="head",
        parameters=own,
        trainable=own,
        products=(Product("logits", hidden, vocab, "outer"),),
        forward_traffic=Amount(split=vocab, split_bytes=12 * vocab, whole=2 * hidden),
        backward_traffic=Amount(split=vocab, split_bytes=8 * vocab, whole=3 * hidden),
        saved=dict.fromkeys(RECOMPUTE_LEVELS, logits),
        operators=16,
        degrees=tuple(_end_split(shape, degree, 0, 1) for degree in degrees),
    )
    return embedding, head


def _end_split(shape: Shape, degree: int, forward: int, backward: int) -> TensorSplit:
    """A vocabulary cut over the ranks: one reduce of the hidden state, forward or backward."""
    if degree > shape.vocab:
        return TensorSplit(degree, f"leaves a rank without a part of the vocabulary {shape.vocab}")
    if degree == 1:
        return TensorSplit(1, sequence=())
    reduce = Collective("all_reduce", shape.hidden, forward, backward)
    sequence = (
        Collective("all_gather", shape.hidden, backward, forward + backward),
        Collective("reduce_scatter", shape.hidden, forward, backward),
    )
    return TensorSplit(degree, collectives=(reduce,), sequence=sequence)
