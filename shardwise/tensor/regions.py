"""Regions: the code between matrix products, and how the features of its inputs and outputs belong together.

Products whose results meet in the input of another product are in one region with it (q, k and v meet in the input
of o). A region can be computed on a part of its features (*split*) where each part of what a product reads follows
from the same part of what the products before it give, and from tensors that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.spec.layout import chunk_range
from shardwise.tensor.parts import Parts, find_parts
from shardwise.tensor.table import ParamCut
from shardwise.tensor.trace import BlockTrace, Product, supports

ENTRY, EXIT = "entry", "exit"


@dataclass
class Region:
    """One region of a block.

    Args:
        sources: names of the products whose results it reads; ``ENTRY``: the block's input.
        sinks: names of the products that read its results; ``EXIT``: the block's result.
        params: full names of the parameters that take part in it, those of products left out.
        chunked: source -> the parts of its features, where the region is split; the other sources stay whole.
        narrow: sinks that read a part of their features, where the region is split; the others read shares.
        cuts: parameter -> its cut, where the region is split.
        splittable: whether there is such a split.
        reads_outside: whether parameters outside of the block take part (an input of its own for each block is made
            from them); other blocks may read these whole, so that no rank may have a share of their gradient.
    """

    sources: set[str] = field(default_factory=set)
    sinks: set[str] = field(default_factory=set)
    params: set[str] = field(default_factory=set)
    chunked: dict[str, Parts] = field(default_factory=dict)
    narrow: set[str] = field(default_factory=set)
    cuts: dict[str, ParamCut] = field(default_factory=dict)
    splittable: bool = False
    reads_outside: bool = False

    @property
    def is_residual(self) -> bool:
        """Whether it holds the block's own input or result, which every rank has whole."""
        return ENTRY in self.sources or EXIT in self.sinks


def find_regions(model: nn.Module, trace: BlockTrace, degree: int) -> list[Region]:
    """The regions of a block, each with the split over ``degree`` ranks that its dependencies allow."""
    products = {product.name: product for product in trace.products}
    inside = {id(p) for product in products.values() for p in product.module.parameters(recurse=False)}
    params = {name: p for name, p in model.named_parameters() if id(p) not in inside and p.requires_grad}
    sources = {ENTRY: trace.entry} | {name: product.output for name, product in products.items()}
    sinks = {name: product.inputs for name, product in products.items()} | {EXIT: [trace.exit]}
    reads = {name: _reads(inputs, sources, params) for name, inputs in sinks.items()}
    regions = _connected(reads, set(sources))
    for region in regions:
        region.reads_outside = any(not name.startswith(f"{trace.name}.") for name in region.params)
        if not region.is_residual and not region.reads_outside:
            _find_split(region, products, params, degree)
    return regions


def _reads(
    inputs: Sequence[torch.Tensor], sources: dict[str, torch.Tensor], params: dict[str, torch.Tensor]
) -> tuple[set[str], set[str]]:
    """Sources and parameters that a sink's inputs were computed from."""
    names = [*sources, *params]
    read: set[str] = set()
    for tensor in inputs:
        (found,) = supports(tensor, [(0, tensor.shape[-1])], [*sources.values(), *params.values()])
        read |= {name for name, support in zip(names, found, strict=True) if support is not None}
    return read & set(sources), read & set(params)


def _connected(reads: dict[str, tuple[set[str], set[str]]], sources: set[str]) -> list[Region]:
    """Sinks with a source in common are in one region."""
    regions: list[Region] = []
    for sink, (read, params) in reads.items():
        own = Region(set(read), {sink}, set(params))
        apart = []
        for region in regions:
            if region.sources & own.sources:
                own = Region(region.sources | own.sources, region.sinks | own.sinks, region.params | own.params)
            else:
                apart.append(region)
        regions = [*apart, own]
    return regions


def _find_split(region: Region, products: dict[str, Product], params: dict[str, torch.Tensor], degree: int) -> None:
    """Fill in how ``region`` is split, where it can be."""
    names, owned = sorted(region.sources), sorted(region.params)
    leaves = [products[name].output for name in names] + [params[name] for name in owned]
    needs: dict[str, list[list[torch.Tensor | None]]] = {}
    for sink in sorted(region.sinks):
        product = products[sink]
        if product.is_linear and product.in_features >= degree:
            ranges = [chunk_range(product.in_features, degree, rank) for rank in range(degree)]
            needs[sink] = supports(product.inputs[0], ranges, leaves)
    chunks = {
        sink: {name: own for i, name in enumerate(names) if (own := _feature_parts([row[i] for row in found]))}
        for sink, found in needs.items()
    }
    region.narrow = {sink for sink, found in chunks.items() if found}
    for name in names:
        readers = [sink for sink in region.sinks if sink not in needs or _is_read(needs[sink], names.index(name))]
        parts = {chunks[sink].get(name) if sink in region.narrow else None for sink in readers}
        if len(parts) == 1 and (one := parts.pop()) is not None:
            region.chunked[name] = one
    region.narrow = {sink for sink in region.narrow if set(chunks[sink]) & set(region.chunked)}
    region.splittable = bool(region.narrow) and all(
        # What is chunked must not be read whole.
        set(chunks[sink]) & set(region.chunked) == {n for n in region.chunked if _is_read(found, names.index(n))}
        for sink, found in needs.items()
    )
    for index, name in enumerate(owned, start=len(names)):
        cuts = {_param_cut([row[index] for row in needs[sink]]) for sink in region.narrow if sink in needs}
        cuts.discard(None)
        region.cuts[name] = cuts.pop() or ParamCut() if len(cuts) == 1 else ParamCut()


def _is_read(found: list[list[torch.Tensor | None]], index: int) -> bool:
    return any(row[index] is not None for row in found)


def _feature_parts(needed: Sequence[torch.Tensor | None]) -> Parts | None:
    """How the last dim of a source is cut, where no rank needs all of it."""
    held = _held(needed, -1)
    return None if held is None or needed[0] is None else find_parts(held, needed[0].shape[-1])


def _held(needed: Sequence[torch.Tensor | None], dim: int) -> list[list[int]] | None:
    """The indices along ``dim`` that each rank needs."""
    held = []
    for support in needed:
        if support is None:
            return None
        others = [d for d in range(support.dim()) if d != dim % support.dim()]
        along = support.any(dim=others) if others else support
        held.append(along.nonzero().flatten().tolist())
    return held


def _param_cut(needed: Sequence[torch.Tensor | None]) -> ParamCut | None:
    """The cut of a parameter; None where nothing depends on it."""
    if all(support is None for support in needed):
        return None
    first = next(support for support in needed if support is not None)
    for dim in range(first.dim()):
        held = _held(needed, dim)
        parts = None if held is None else find_parts(held, first.shape[dim])
        if parts is not None:
            return ParamCut(dim, parts)
    return ParamCut()
