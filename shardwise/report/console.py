"""What a run says of itself before it starts: the model, the strategy, each rank's part, the batch."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.spec.plan import Plan, batch_equation, ranks
from shardwise.spec.run import RunConfig
from shardwise.units import format_bytes, format_count

MAX_ROWS = 16


def show_plan(run: RunConfig, plan: Plan, console: Console) -> None:
    """Print the header of a run."""
    model, strategy = plan.model, plan.strategy
    ties = "tied embedding" if model.tied else "untied head"
    heads = f"{model.num_heads} heads, {model.num_kv_heads} KV heads, " if model.num_heads else ""
    show_line(
        console,
        "model",
        f"{run.model}: {model.architecture}, {format_count(model.num_parameters)} parameters, "
        f"{model.num_blocks} blocks, {heads}"
        f"vocabulary {model.vocab_size}, {ties}",
    )
    show_line(console, "strategy", f"{'; '.join([str(strategy), *_details(run, plan)])} on {plan.device_type}")
    gradients = gradient_line(plan)
    if gradients:
        show_line(console, "gradients", gradients)
    console.print(_rank_table(plan))
    show_line(console, "batch", batch_equation(plan))
    missing = strategy.pp - plan.num_micro_batches
    if missing > 0:  # the loader fills them with rows that are not supervised
        rule = f"{strategy.pp} stages need as many micro-batches: {missing} of {strategy.pp} are empty in each step"
        show_line(console, "", f"{rule}; a smaller strategy.micro_batch_size fills them")


def _details(run: RunConfig, plan: Plan) -> list[str]:
    """What the degrees alone do not say of a strategy."""
    model, strategy = plan.model, plan.strategy
    details = [f"{strategy.schedule} over stages of {', '.join(map(str, strategy.stages))} blocks"]
    if strategy.virtual_stages > 1:
        details[0] += f", {strategy.virtual_stages} on each rank"
    if strategy.pp == 1:
        details = []
    if strategy.sequence_parallel:
        details.append(f"sequence parallel: norms and the residual stream on 1/{strategy.tp} of the sequence")
    if strategy.tp_whole is not None:
        details.append(f"up to {100 * strategy.tp_whole:g} % of the blocks' weights whole on each tensor rank")
    if strategy.dp_shard > 1:
        details.append("ZeRO-3 (reshard)" if strategy.reshard else "ZeRO-2 (no reshard)")
    if strategy.recompute:
        details.append(
            "recompute " + ("all blocks" if strategy.recompute < 0 else f"{strategy.recompute} blocks a stage")
        )
    if run.train.precision == "bf16":
        details.append("bf16 with fp32 masters")
    if run.train.compile:
        details.append("compiled blocks")
    if strategy.tp > model.num_kv_heads > 0:
        details.append(f"{model.num_kv_heads} KV heads for {strategy.tp} tensor ranks: neighbours hold the same head")
    return details


def show_line(console: Console, label: str, text: str) -> None:
    """A line with its label in bold, wrapped only for a terminal.

    The text is shown as it is: a path may look like markup or like an emoji.
    """
    console.print(Text.assemble((f"{label:9}", "bold"), " ", text), soft_wrap=not console.is_terminal)


def gradient_line(plan: Plan) -> str:
    """How gradients are summed over the data ranks; empty where there are none and nobody asked."""
    strategy = plan.strategy
    groups = strategy.gradient_aggregation_group
    if strategy.dp == 1:
        key = f"strategy.gradient_aggregation_group = {groups}"
        return f"{key}: without data parallelism there is nothing to group" if groups else ""
    if strategy.dp_shard > 1:
        units = min(groups or max(strategy.stages), max(strategy.stages))
        how = f"reduced in {units} unit{'s' if units > 1 else ''} of blocks a stage"
        return f"{how}, over {strategy.dp} data ranks"
    buckets = f"{groups} bucket{'s' if groups > 1 else ''}" if groups else "buckets of 25 MiB"
    return f"summed over {strategy.dp} replicas in {buckets}, while the backward pass runs"


def _rank_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("rank", "pp", "dp", "tp", "holds", "weights (fp32)"):
        table.add_column(column, justify="left" if column == "holds" else "right")
    for share in ranks(plan, MAX_ROWS):
        place = share.coordinates
        data = place["dp_replicate"] * plan.strategy.dp_shard + place["dp_shard"]
        table.add_row(
            str(share.rank),
            str(place["pp"]),
            str(data),
            str(place["tp"]),
            str(share),
            format_bytes(share.parameter_bytes),
        )
    if plan.devices > MAX_ROWS:
        table.add_row("...", "", "", "", f"and {plan.devices - MAX_ROWS} more ranks; all of them are in plan.json", "")
    return table
