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
_PREFIXES = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers", "backbone.layers")
_MOST_BLOCKS = 200  # whose numbers a pattern may name


@dataclass(frozen=True)
class Lora:
    """Rank, and which linear layers get an adapter or train whole, as ``lora`` of run.yaml has them.

    What is named in one block counts in all blocks of its kind.

    Args:
        targets: names or ends of names; a text is a pattern for whole names, or ``all-linear``: all but the head.
        whole: ends of names of modules that train whole beside the adapters (``modules_to_save``).
        dropout: of what enters an adapter; above 0 each keeps an input of its own, and the mask.
    """

    rank: int = 8
    targets: str | tuple[str, ...] = ALL_LINEAR
    whole: tuple[str, ...] = ()
    dropout: float = 0.0


def adapted(costs: ModelCosts, lora: Lora) -> ModelCosts:
    """The model with nothing to train but adapters and what ``lora`` names to be trained whole.

    Raises:
        ConfigError: a target that is no linear layer of the model.
    """
    _check(costs, lora)
    ends = {"embedding": costs.embedding, "head": costs.head}
    whole = {name for name, part in ends.items() if any(_is_end(entry, part) for entry in lora.whole)}
    whole |= set(ends) if costs.tied and whole else set()
    return replace(
        costs,
        kinds=tuple(_part(kind, lora, False) for kind in costs.kinds),
        more=tuple(_part(part, lora, False) for part in costs.more),
        embedding=_part(costs.embedding, lora, "embedding" in whole),
        head=_part(costs.head, lora, "head" in whole),
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


def _part(part: PartCosts, lora: Lora, whole: bool) -> PartCosts:
    """A part with adapters at its targets, everything else frozen unless it trains ``whole``."""
    own = [one for one in part.products if not whole and _is_target(one, part, lora)]
    base = part.trainable if whole else Parameters()
    products = [one if whole else replace(one, trainable=False) for one in part.products]
    if not own:
        return replace(part, trainable=base, products=tuple(products))
    more = [adapter for one in own for adapter in _adapter(one, lora.rank)]
    size = Parameters()
    for one in more:
        number = one.inner * one.outer
        size = size + (Parameters(whole=number) if one.split == "none" else Parameters(split=number))
    degrees = [d if d.whole is None else replace(d, whole=d.whole + size.whole) for d in part.degrees]
    # The scale reads and writes what the adapter gives, the sum reads it too; backward one pass over each.
    wide = {
        True: sum(p.outer for p in own if p.split == "outer"),
        False: sum(p.outer for p in own if p.split != "outer"),
    }
    traffic = Amount(split=5.0 * wide[True], whole=5.0 * wide[False])
    kept = Amount(whole=float(lora.rank * len(own))) + (_dropped(own) if lora.dropout else Amount())
    return replace(
        part,
        parameters=part.parameters + size,
        trainable=base + size,
        products=(*products, *more),
        forward_traffic=part.forward_traffic + traffic,
        backward_traffic=part.backward_traffic + traffic,
        saved={level: amount if level == "full" else amount + kept for level, amount in part.saved.items()},
        operators=part.operators + _OPERATORS * len(own),
        degrees=tuple(degrees),
    )


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


def _is_target(product: Product, part: PartCosts, lora: Lora) -> bool:
    if product.copies > 1 or _NO_LINEAR.search(product.name) or part.name == TIED_COPY:
        return False
    if lora.targets == ALL_LINEAR:
        return part.name not in ("embedding", "head")
    if isinstance(lora.targets, str):
        return any(re.fullmatch(lora.targets, name) for name in _full_names(product, part))
    return any(_ends_with(entry, product.name) for entry in lora.targets)


def _full_names(product: Product, part: PartCosts) -> list[str]:
    """Names that a pattern can mean: of a block's layer with any number, under the prefixes of usual families."""
    if part.name in ("embedding", "head"):
        return [product.name]
    blocks = [f"{prefix}.{number}" for prefix in _PREFIXES for number in range(_MOST_BLOCKS)]
    return [product.name, *(f"{block}.{product.name}" for block in blocks)]


def _ends_with(entry: str, name: str) -> bool:
    """Whether one is the other, or the end of it: entries may be whole names, products' names begin in their block."""
    return name == entry or name.endswith(f".{entry}") or entry.endswith(f".{name}")


def _is_end(entry: str, part: PartCosts) -> bool:
    if part.name == "head":
        return any(_ends_with(entry, product.name) for product in part.products)
    return _EMBEDDINGS.search(entry) is not None


def _check(costs: ModelCosts, lora: Lora) -> None:
    parts = (*costs.kinds, costs.head)
    names = list(dict.fromkeys(p.name for part in parts for p in part.products if p.copies == 1))
    entries: Sequence[str] = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
    for entry in entries:
        one = replace(lora, targets=entry if isinstance(lora.targets, str) else (entry,))
        if not any(_is_target(product, part, one) for part in parts for product in part.products):
            known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names if not _NO_LINEAR.search(name)))
            raise ConfigError(f"lora.target_modules = {entry!r}", "matches no linear layer", f"Names here: {known}")
