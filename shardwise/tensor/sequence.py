"""Whether a block's residual stream can be cut along the sequence, and where the whole sequence is needed.

The residual stream can be cut where each of its tokens follows from the same token of what it is made of: in norms,
sums, routers. The products between two places of it (q, k, v and o; gate, up and down) get the whole sequence. It is
gathered at the innermost module that holds all of them, or all that read it, since its forward takes shapes from what
it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.tensor.regions import ENTRY, EXIT, Region
from shardwise.tensor.search import Problem, Solution, solve
from shardwise.tensor.table import Style
from shardwise.tensor.trace import LENGTH, ROWS, BlockTrace, trace_blocks

VALUE, REMEDY = "strategy.sequence_parallel = true", "Use strategy.sequence_parallel=false"


def uneven_length(degree: int) -> int:
    """A short length that the ranks do not divide evenly, so that a proof covers the positions behind the end."""
    return next(length for length in (LENGTH - 1, LENGTH - 2) if length % degree)


def solve_sliced(trace: BlockTrace, problem: Problem) -> tuple[Problem, Solution]:
    """The best table of a block whose residual stream is cut along the sequence.

    Raises:
        PlanError: a token of its residual stream depends on others, or no table fits.
    """
    for region in problem.regions:
        if region.is_residual:
            _check_token_wise(trace, region)
    sliced = replace(problem, sequence=True)
    try:
        return sliced, solve(sliced)
    except ValueError:
        rule = f"{trace.name} has experts between other matrices, which cannot be given a part of the sequence"
        raise PlanError(VALUE, rule, REMEDY) from None


def _check_token_wise(trace: BlockTrace, region: Region) -> None:
    products = {product.name: product for product in trace.products}
    sources = {name: trace.entry if name == ENTRY else products[name].output for name in sorted(region.sources)}
    for sink in sorted(region.sinks):
        for tensor in [trace.exit] if sink == EXIT else products[sink].inputs:
            by_position = _by_position(tensor, trace.name if sink == EXIT else sink)
            if tensor.requires_grad and any(_is_mixed(by_position, place, sources) for place in range(LENGTH)):
                what = "its result" if sink == EXIT else f"what {sink} reads"
                rule = f"in {trace.name} {what} at one token depends on other tokens outside of attention"
                raise PlanError(VALUE, rule, REMEDY)


def _is_mixed(by_position: torch.Tensor, place: int, sources: Mapping[str, torch.Tensor]) -> bool:
    """Whether the tokens at one place of the sequence depend on those of ``sources`` at other places."""
    chosen = by_position[:, place]
    weight = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(3), dtype=chosen.dtype) + 0.5
    grads = torch.autograd.grad(chosen, list(sources.values()), weight, retain_graph=True, allow_unused=True)
    others = [other for other in range(LENGTH) if other != place]
    pairs = zip(sources, grads, strict=True)
    return any(grad is not None and bool(_by_position(grad, name)[:, others].any()) for name, grad in pairs)


def _by_position(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """[rows, length, ...] of a tensor of the traced pass."""
    if tensor.shape[:2] == (ROWS, LENGTH):
        return tensor
    if tensor.shape[0] % (ROWS * LENGTH) == 0:  # all tokens once, or once for each of several experts
        return tensor.unflatten(0, (-1, ROWS, LENGTH)).movedim(0, 2)
    rule = f"{name} holds its tokens as {list(tensor.shape)}, in which no sequence can be told"
    raise PlanError(VALUE, rule, REMEDY)


def gather_points(
    small: nn.Module, blocks: str, trace: BlockTrace, problem: Problem, common: Callable[[Sequence[str]], str]
) -> dict[str, tuple[str, ...]]:
    """Where the sequence is gathered: module -> which of its arguments, by place or name.

    Args:
        blocks: name of the list of blocks.
        common: the innermost module that holds some modules.
    """
    found: dict[str, tuple[str, ...]] = {}
    for members in _components(problem):
        entries = [name for name in members if problem.regions[problem.region_before(name)].is_residual]
        # One whose result is read by nothing with a gradient (it chooses what attention looks at) may be in there too.
        others = [n for n in problem.products if n not in members and problem.region_behind(n) is not None]
        # The module around all of them; else, where the sum with the residual stream stands in there too, the one
        # around those that read it; in a block that calls the matrices itself these matrices.
        scopes = [scope for scope in (common(members), common(entries)) if scope.startswith(f"{trace.name}.")]
        suited = ({scope: entries} for scope in scopes if not any(name.startswith(f"{scope}.") for name in others))
        for readers in (*suited, {name: [name] for name in entries}):
            keys = _arguments_read(small, blocks, trace.name, readers)
            if keys:
                found |= keys
                break
    return found


def _components(problem: Problem) -> Iterator[list[str]]:
    """Products that inner regions connect, in their order; those between residual stream and residual stream not."""
    groups: list[set[str]] = []
    for region in problem.regions:
        if not region.is_residual:
            own = (region.sources | region.sinks) & set(problem.products)
            apart = [group for group in groups if not group & own]
            groups = [*apart, own.union(*(group for group in groups if group & own))]
    for group in groups:
        yield [name for name in problem.products if name in group]


def _arguments_read(
    small: nn.Module, blocks: str, block: str, readers: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Which arguments of modules the inputs of products in them are computed from.

    Args:
        readers: module -> products. One that hands such an argument on past its products is left out.
    """
    calls: dict[str, dict[str, torch.Tensor]] = {}
    results: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name in readers:
        module = small.get_submodule(name)
        handles.append(module.register_forward_pre_hook(_noting_arguments(calls, name), with_kwargs=True))
        handles.append(module.register_forward_hook(_noting_results(results, name)))
    try:
        traces = trace_blocks(small, blocks)
    finally:
        for handle in handles:
            handle.remove()
    products = {product.name: product for trace in traces if trace.name == block for product in trace.products}
    found = {}
    for name, inside in readers.items():
        inputs = [tensor for reader in inside for tensor in products[reader].inputs]
        given = calls.get(name, {})
        keys = tuple(key for key, value in given.items() if any(_depends(x, value) for x in inputs))
        past = [] if name in products else results.get(name, [])
        if keys and not any(_depends(result, given[key]) for result in past for key in keys):
            found[name] = keys
    return found


def _noting_arguments(calls: dict[str, dict[str, torch.Tensor]], name: str) -> Callable[..., Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Copies: a residual may be given beside what was computed from it.
        places = {str(place): _copy(value) for place, value in enumerate(args)}
        names = {key: _copy(value) for key, value in kwargs.items()}
        given = {**places, **names}
        calls[name] = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and v.requires_grad}
        return tuple(places.values()), names

    return hook


def _noting_results(results: dict[str, list[torch.Tensor]], name: str) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        values = out if isinstance(out, tuple | list) else [out]
        results[name] = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]

    return hook


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _depends(output: torch.Tensor, source: torch.Tensor) -> bool:
    if output is source:
        return True
    (grad,) = torch.autograd.grad(output, [source], torch.ones_like(output), retain_graph=True, allow_unused=True)
    return grad is not None


def sliced_biases(solution: Solution) -> Iterator[str]:
    """Biases that each rank adds to its positions alone, so that their gradient is a share: those of row products."""
    for name, choice in solution.choices.items():
        if choice.split is not None and choice.split.sequence and choice.split.style in (Style.ROW, Style.ROW_SPLIT):
            yield f"{name}.bias"
