"""What low-rank adapters (Hu et al. 2021, arXiv:2106.09685) cost: counted product by product, from targets and rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.errors import ConfigError
from shardwise.planner.parts import TIED_COPY
from shardwise.spec.block import Amount, ModelCosts, Parameters, PartCosts, Product

ALL_LINEAR = "all-linear"
_NO_LINEAR = re.compile(r"(^|\.)(gate|router|product)$")  # routers are weights of classes of their own
_EMBEDDINGS = re.compile(r"(^|[._])(emb\w*|wte|wpe|embed_\w+)$")
_OPERATORS = 4  # of an adapter: two products, its scale, the sum with what the layer gives
# Of usual families, for costs that do not name the list of blocks.
_PREFIXES = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers", "backbone.layers")
_ENDS = ("embedding", "head", TIED_COPY)


@dataclass(frozen=True)
class Lora:
    """Rank, and which linear layers get an adapter or train whole, as ``lora`` of run.yaml has them.

    Args:
        targets: names or ends of names; a text is a pattern for whole names, or ``all-linear``: all but the head.
        whole: ends of names of modules that train whole beside the adapters (``modules_to_save``); norms are too small
            to count.
        dropout: of what enters an adapter; above 0 each keeps an input of its own, and the mask.
    """

    rank: int = 8
    targets: str | tuple[str, ...] = ALL_LINEAR
    whole: tuple[str, ...] = ()
    dropout: float = 0.0


@dataclass(frozen=True)
class _Chosen:
    """Names of products of a block that get an adapter, and of those that train whole."""

    adapted: frozenset[str]
    whole: frozenset[str]


def adapted(costs: ModelCosts, lora: Lora) -> ModelCosts:
    """The model with nothing to train but adapters and what ``lora`` names to be trained whole.

    Blocks of one kind that differ in what trains become kinds of their own.

    Raises:
        ConfigError: a target that is no linear layer of the model.
    """
    _check(costs, lora)
    kinds: dict[tuple[int, _Chosen], int] = {}
    order = [
        kinds.setdefault((kind, _chosen(costs.kinds[kind], _block_names(costs, block), lora)), len(kinds))
        for block, kind in enumerate(costs.order)
    ]

    def blocks(own: Sequence[PartCosts]) -> tuple[PartCosts, ...]:
        return tuple(_part(own[kind], lora, chosen) for kind, chosen in kinds)

    ends = {"embedding": costs.embedding, "head": costs.head}
    whole = {name for name, part in ends.items() if any(_is_end(entry, part) for entry in lora.whole)}
    whole |= set(ends) if costs.tied and whole else set()

    def end(part: PartCosts) -> PartCosts:
        if part.name in whole:
            return part
        return _part(part, lora, _chosen(part, ("",), lora))

    return replace(
        costs,
        kinds=blocks(costs.kinds),
        order=tuple(order),
        more=tuple(map(end, costs.more)),
        embedding=end(costs.embedding),
        head=end(costs.head),
        tables=tuple(replace(one, kinds=blocks(one.kinds)) for one in costs.tables),
    )


def adapter_parameters(costs: ModelCosts) -> int | None:
    """Numbers in all adapters; None where there are none."""
    kinds = [costs.kinds[kind] for kind in costs.order]
    number = sum(
        product.inner * product.outer
        for part in (*kinds, costs.embedding, costs.head, *costs.more)
        for product in part.products
        if ".lora_" in product.name
    )
    return number or None


def _part(part: PartCosts, lora: Lora, chosen: _Chosen) -> PartCosts:
    """A part with adapters at its targets, everything else frozen unless it trains whole."""
    own = [one for one in part.products if one.name in chosen.adapted]
    products = [replace(one, trainable=one.name in chosen.whole) for one in part.products]
    base = _sizes([one for one in part.products if one.name in chosen.whole])
    if not own:
        return replace(part, trainable=base, products=tuple(products))
    more = [adapter for one in own for adapter in _adapter(one, lora.rank)]
    size = _sizes(more)
    degrees = [d if d.whole is None else replace(d, whole=d.whole + size.whole) for d in part.degrees]
    # The scale reads and writes what the adapter gives, the sum reads it too; backward one pass over each.
    wide = {
        True: sum(p.outer for p in own if p.split == "outer"),
        False: sum(p.outer for p in own if p.split != "outer"),
    }
    traffic = Amount(split=5.0 * wide[True], whole=5.0 * wide[False])
    kept = Amount(whole=float(lora.rank * len(own)))
    if lora.dropout:
        dropped = _dropped(own)
        kept = kept + dropped
        # Each way it reads what comes in, and the mask or writes it, and writes what goes on.
        traffic = traffic + dropped + Amount(split=dropped.split, whole=dropped.whole)
    return replace(
        part,
        parameters=part.parameters + size,
        trainable=base + size,
        products=(*products, *more),
        forward_traffic=part.forward_traffic + traffic,
        backward_traffic=part.backward_traffic + traffic,
        saved={level: amount if level == "full" else amount + kept for level, amount in part.saved.items()},
        operators=part.operators + (_OPERATORS + int(lora.dropout > 0)) * len(own),
        degrees=tuple(degrees),
    )


def _sizes(products: Sequence[Product]) -> Parameters:
    size = Parameters()
    for one in products:
        kind = "expert" if one.copies > 1 else "whole" if one.split == "none" else "split"
        size = size + Parameters(**{kind: one.inner * one.outer * one.copies})
    return size


def _dropped(products: Sequence[Product]) -> Amount:
    """What dropout before adapters keeps: of each its result, which A reads, and the mask in bytes."""
    split, whole = (float(sum(p.inner for p in products if (p.split == "inner") is cut)) for cut in (True, False))
    return Amount(split=split, whole=whole, split_bytes=split, whole_bytes=whole)


def _adapter(product: Product, rank: int) -> tuple[Product, Product]:
    """A and B: of a layer that tensor ranks cut, the one that lies at the cut is cut too."""
    first = "inner" if product.split == "inner" else "none"
    second = "outer" if product.split == "outer" else "none"
    return (
        Product(f"{product.name}.lora_A", product.inner, rank, first, product.uses),  # type: ignore[arg-type]
        Product(f"{product.name}.lora_B", rank, product.outer, second, product.uses),  # type: ignore[arg-type]
    )


def _chosen(part: PartCosts, prefixes: Sequence[str], lora: Lora) -> _Chosen:
    """What of a part is named, whose products' names begin with one of ``prefixes``."""
    names = {one.name: [f"{prefix}{one.name}" for prefix in prefixes] for one in part.products}
    whole = frozenset(name for name, full in names.items() if _is_saved(full, lora) and part.name not in _ENDS)
    targets = (one.name for one in part.products if _is_target(one, names[one.name], part, lora))
    return _Chosen(frozenset(targets) - whole, whole)


def _block_names(costs: ModelCosts, block: int) -> tuple[str, ...]:
    """With what names of modules in a block may begin."""
    return tuple(f"{prefix}.{block}." for prefix in ((costs.blocks,) if costs.blocks else _PREFIXES))


def _is_target(product: Product, names: Sequence[str], part: PartCosts, lora: Lora) -> bool:
    if product.copies > 1 or _NO_LINEAR.search(product.name) or part.name == TIED_COPY:
        return False
    if lora.targets == ALL_LINEAR:
        return part.name not in _ENDS
    if isinstance(lora.targets, str):
        return any(re.fullmatch(lora.targets, name) for name in names)
    return any(_matches(entry, name) for entry in lora.targets for name in names)


def _is_saved(names: Sequence[str], lora: Lora) -> bool:
    """Whether an entry of ``modules_to_save`` is the end of a name, or of that of a module around it."""
    return any(_around(name, entry) for name in names for entry in lora.whole)


def _around(name: str, entry: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:stop]).endswith(entry) for stop in range(1, len(parts) + 1))


def _matches(entry: str, name: str) -> bool:
    return name == entry or name.endswith(f".{entry}")


def _is_end(entry: str, part: PartCosts) -> bool:
    if part.name == "head":
        return any(product.name.endswith(entry) for product in part.products)
    return _EMBEDDINGS.search(entry) is not None


def _check(costs: ModelCosts, lora: Lora) -> None:
    if lora.targets == ALL_LINEAR:
        return
    blocks = dict.fromkeys((kind, block) for block, kind in enumerate(costs.order))
    parts = [(costs.kinds[kind], _block_names(costs, block)) for kind, block in blocks] + [(costs.head, ("",))]
    products = [one for part in (*costs.kinds, costs.head) for one in part.products if one.copies == 1]
    for entry in (lora.targets,) if isinstance(lora.targets, str) else lora.targets:
        one = replace(lora, targets=entry if isinstance(lora.targets, str) else (entry,), whole=())
        if not any(_chosen(part, names, one).adapted for part, names in parts):
            names = [product.name for product in products if not _NO_LINEAR.search(product.name)]
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise ConfigError(f"lora.target_modules = {entry!r}", "matches no linear layer", f"Names here: {known}")
