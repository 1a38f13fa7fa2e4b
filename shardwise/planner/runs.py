"""Published or own training runs, one a row of a CSV file: what to predict, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import isfinite, nan
from typing import Any, Literal

from shardwise.planner.adapters import Lora, adapted
from shardwise.planner.known import known_costs, known_models
from shardwise.planner.layout import Layout, Work
from shardwise.planner.shape import Experts, Latent, Shape, model_costs
from shardwise.planner.software import Software, software_of
from shardwise.spec.block import ModelCosts, RecomputeLevel
from shardwise.spec.cluster import ClusterSpec, load_cluster
from shardwise.spec.strategy import default_stages

Row = Mapping[str, str]
# Names of devices as people write them: the first pattern that is found in the column `chip`.
_CHIPS = (
    ("910a|910pro", "ascend-910a"),
    ("910b1", "ascend-910b1"),
    ("910b3", "ascend-910b3"),
    ("910b4", "ascend-910b4"),
    ("910b", "ascend-910b2"),
    ("910c", "ascend-910c"),
    ("ascend ?910", "ascend-910a"),
    ("h100.*96", "h100-96gb-500w"),
    ("gh200", "gh200"),
    ("gb300", "gb300"),
    ("gb200", "gb200"),
    ("b300", "b300"),
    ("b200", "b200"),
    ("h100", "h100-80gb"),
    ("h800", "h800-80gb"),
    ("h200", "h200-141gb"),
    ("h20", "h20-96gb"),
    ("a800", "a800-80gb"),
    ("a100.*40", "a100-40gb"),
    ("a100", "a100-80gb"),
    ("v100.*16", "v100-16gb"),
    ("v100", "v100-32gb"),
    ("4090", "rtx-4090"),
    ("l40s", "l40s"),
    ("t4", "t4"),
)
_VOCABULARIES = (
    ("baichuan2", 125696),
    ("llama3", 128256),
    ("llama-3", 128256),
    ("qwen", 151936),
    ("deepseek", 129280),
    ("gemma", 256000),
    ("glm4", 151552),
)

_MOST, _MOST_LAYERS = 1e12, 10_000  # what a count of a table can be


class SkippedRow(ValueError):
    """A row that cannot be predicted, with the reason."""


@dataclass(frozen=True)
class Run:
    """One row: the four arguments of ``estimate``, and the measured values where there are some."""

    id: str
    source: str
    costs: ModelCosts
    cluster: ClusterSpec
    layout: Layout
    work: Work
    seconds: float | None
    memory_bytes: float | None
    memory_kind: str


def read_run(row: Row) -> Run:
    """The run that a row describes.

    Raises:
        SkippedRow: a needed column is empty, or the row is of a kind that is not predicted.
    """
    tp, pp, cp = _count(row, "tp", 1), _count(row, "pp", 1), _count(row, "cp", 1)
    dp = _count(row, "dp", 0) or _count(row, "num_devices") // (tp * pp * cp)
    if dp < 1:
        raise SkippedRow(f"{row.get('num_devices')} devices are fewer than tp x pp x cp = {tp * pp * cp}")
    software = software_of(row)
    precision = _precision(row)
    shape = _shape(row)
    costs = _costs(row, shape, tp)
    if "lora" in row.get("train_type", "").lower():
        rank = re.search(r"lora-r=(\d+)", row.get("other_opts", ""))
        costs = adapted(costs, Lora(int(rank[1]) if rank and int(rank[1]) else 8))
    rows, micro_batch = _count(row, "global_batch_seqs"), _count(row, "micro_batch")
    if rows % (dp * micro_batch):
        raise SkippedRow(f"{rows} rows are no multiple of dp x micro_batch = {dp * micro_batch}")
    _check(costs, tp, pp)
    devices = _count(row, "num_devices", 0)
    if devices and devices != tp * pp * cp * dp:
        raise SkippedRow(f"num_devices = {devices} is not tp x pp x cp x dp = {tp * pp * cp * dp}")
    ep = _count(row, "ep", 1) if shape.experts else 1
    layout = _layout(row, Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, micro_batch=micro_batch), shape.num_blocks)
    layout = replace(layout, num_micro_batches=rows // (dp * micro_batch), expert_tensor=ep <= dp * cp)
    layout = _sharded(row, layout)
    if layout.num_micro_batches < pp:
        layout = replace(layout, schedule="gpipe", virtual_stages=1, **_stages(row, pp, shape.num_blocks, 1))
    if "schedules-method=dualpipev" in row.get("other_opts", "") and pp > 1:
        costs, layout = _folded(row, costs, layout)
    cluster = _cluster(row, software.stack)
    if not row.get("precision") and precision not in cluster.chip.peak_flops:
        precision = "fp16"
    if precision not in cluster.chip.peak_flops:
        raise SkippedRow(f"{cluster.chip.name} has {', '.join(cluster.chip.peak_flops)}, and no {precision}")
    return Run(
        id=row.get("id", ""),
        source=row.get("source", ""),
        costs=costs,
        cluster=cluster,
        layout=layout,
        work=_work(row, software, precision, shape, layout),
        seconds=_measured(row, "step_s_norm") or _measured(row, "step_seconds"),
        memory_bytes=_memory(row),
        memory_kind=row.get("mem_kind", ""),
    )


def _costs(row: Row, shape: Shape, tp: int) -> ModelCosts:
    """Of our own runs of a well-known model, with its sizes, those that plans count with; of all else those of the
    sizes."""
    name = row.get("model_name", "").strip()
    if software_of(row).fields.get("ours") and name in known_models():
        model, costs = known_costs(name)
        own = (model.num_blocks, model.hidden_size, model.num_heads)
        if own == (shape.num_blocks, shape.hidden, shape.heads) and tp in costs.legal_degrees():
            return costs.under(None)
    return model_costs(shape, sorted({1, tp}))


def _work(row: Row, software: Software, precision: str, shape: Shape, layout: Layout) -> Work:
    sequence = _count(row, "seq_len")
    work = replace(software.work(sequence, precision), counted=_counted(row.get("mem_kind", "")))
    if not shape.bias:
        return work
    # [rows x heads, length, length]: made with the first pass, and held by the attention that made it.
    kept = layout.micro_batch * shape.heads / layout.tp * sequence**2 / layout.cp * work.compute_bytes
    return replace(work, kept_bytes=float(kept))


def _folded(row: Row, costs: ModelCosts, layout: Layout) -> tuple[ModelCosts, Layout]:
    """DualPipe's V shape: a rank holds a stage from the front and one from the back, behind each other here."""
    empty = _empty_blocks(row)
    places = [place for place in range(costs.num_blocks + len(empty)) if place not in empty]
    ends = [0, *accumulate(default_stages(costs.num_blocks + len(empty), 2 * layout.pp))]
    chunks = [[i for i, place in enumerate(places) if a <= place < b] for a, b in pairwise(ends)]
    both = [[*chunks[rank], *chunks[-1 - rank]] for rank in range(layout.pp)]
    if not all(both):
        return costs, layout
    order = tuple(costs.order[block] for blocks in both for block in blocks)
    stages = tuple(len(blocks) for blocks in both)
    schedule = "gpipe" if layout.schedule == "gpipe" else "1f1b"
    plain = replace(layout, folded=True, schedule=schedule, virtual_stages=1, stages=stages, recomputed=())
    return replace(costs, order=order), plain


def _check(costs: ModelCosts, tp: int, pp: int) -> None:
    """Refuse what no model can be cut into."""
    if pp > costs.num_blocks:
        raise SkippedRow(f"{costs.num_blocks} blocks are fewer than {pp} stages")
    for part in (*costs.kinds, costs.embedding, costs.head):
        if part.degree(tp).rule:
            raise SkippedRow(f"tp = {tp} {part.degree(tp).rule}")


def _shape(row: Row) -> Shape:
    hidden, heads = _count(row, "hidden"), _count(row, "n_heads")
    if heads > hidden:
        raise SkippedRow(f"n_heads = {heads} are more than hidden = {hidden}")
    latent = row.get("attn_type", "").upper() == "MLA"
    experts = _count(row, "moe_experts", 0)
    eager = row.get("flash_attn") == "0"
    gated = row.get("gated_mlp", "1") != "0"
    ffn = _count(row, "ffn", 4 * hidden)
    return Shape(
        name=row.get("model_name", ""),
        num_blocks=_count(row, "n_layers") - len(_empty_blocks(row)),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(row, "n_kv_heads", heads),
        head_dim=128 if latent else _count(row, "head_dim", hidden // heads),
        ffn=ffn,
        vocab=_count(row, "vocab", _vocabulary(row, gated)),
        gated=gated,
        tied=row.get("tied_embeddings") == "1",
        experts=Experts(
            experts,
            _count(row, "moe_topk", 2),
            _count(row, "moe_ffn", ffn),
            _count(row, "moe_shared_ffn", 0),
        )
        if experts
        else None,
        num_dense=max(0, int(_number(row, "moe_dense_layers") or 0)),
        latent=Latent() if latent else None,
        eager=eager,
        dropout=eager and not gated,
        positions=_count(row, "seq_len") if not gated else 0,
        more_blocks=_count(row, "mtp_layers", 0),
        bias="pos=alibi" in row.get("other_opts", "") and not eager,
        fused_gate="mindspeed" not in row.get("framework", "").lower() or "fused-swiglu" in row.get("other_opts", ""),
        dropped=_dropped(row.get("other_opts", ""), row.get("recompute", "")),
    )


def _dropped(options: str, recompute: str) -> frozenset[str]:
    """What software keeps out of memory by options of its own."""
    words = {
        "norms": "recompute-norm" in recompute,
        "activation": "recompute-activation-function" in recompute,
        "experts": "moe-zero-memory" in recompute,
        "attention": "swap-attention" in options,
        "logits": "fused ce" in options.lower() and "te fused" not in options.lower(),
    }
    return frozenset(name for name, given in words.items() if given)


def _vocabulary(row: Row, gated: bool) -> int:
    """A family's vocabulary where the column is empty."""
    name = row.get("model_name", "").lower()
    return next((size for word, size in _VOCABULARIES if word in name), 32000 if gated else 50304)


def _layout(row: Row, degrees: Layout, num_blocks: int) -> Layout:
    virtual = _count(row, "vpp", 1) if degrees.pp > 1 else 1
    while virtual > 1 and degrees.pp * virtual > num_blocks:
        virtual -= 1
    stages = _stages(row, degrees.pp, num_blocks, virtual)
    return replace(
        degrees,
        sequence_parallel=row.get("sp") == "1" and degrees.tp > 1,
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        ring_attention="ulysses" not in row.get("cp_algo", "").lower(),
        **stages,
    )


def _empty_blocks(row: Row) -> list[int]:
    """Places in the count of blocks that hold nothing, so that the stages come out even."""
    found = re.search(r"noop-layers=([\d,]+)", row.get("other_opts", ""))
    places = sorted({int(place) for place in found[1].split(",")}) if found else []
    return [place for place in places if place < _count(row, "n_layers")]


def _stages(row: Row, pp: int, num_blocks: int, virtual: int) -> dict[str, Any]:
    """Blocks of each stage, and which of them are recomputed."""
    options = row.get("other_opts", "")
    stages = default_stages(num_blocks, pp * virtual)
    if empty := _empty_blocks(row):
        ends = list(accumulate(default_stages(num_blocks + len(empty), pp * virtual)))
        held = [sum(place < end for place in empty) for end in ends]
        ends = [end - lost for end, lost in zip(ends, held, strict=True)]
        stages = tuple(b - a for a, b in pairwise([0, *ends]))
    given = re.search(r"num-layer-list=([\d,]+)", options)
    offset = re.search(r"pp offset=\[([-\d\s]+)\]", options)
    if given and virtual == 1:
        listed = tuple(int(size) for size in given[1].split(","))
        stages = listed if len(listed) == pp and sum(listed) == num_blocks else stages
    elif offset and virtual == 1 and num_blocks % pp == 0:
        moved = tuple(num_blocks // pp + int(more) for more in offset[1].split())
        stages = moved if len(moved) == pp and sum(moved) == num_blocks else stages
    elif num_blocks % (pp * virtual) and (num_blocks + 2) % (pp * virtual) == 0:
        even = (num_blocks + 2) // (pp * virtual)  # the ends count as a block each
        stages = (even - 1, *(even,) * (pp * virtual - 2), even - 1)
    level, number = _recompute(row.get("recompute", ""), row.get("flash_attn") == "0")
    recomputed: tuple[int, ...] = ()
    if isinstance(number, tuple):
        recomputed = tuple(min(a, b) for a, b in zip(number, stages, strict=False))
        recomputed = recomputed if len(recomputed) == len(stages) else ()
    elif number is not None:
        recomputed = tuple(min(number, size) for size in stages)
    return {"stages": stages, "recompute": level, "recomputed": recomputed}


def _recompute(text: str, eager: bool) -> tuple[RecomputeLevel, int | tuple[int, ...] | None]:
    """Level, and how many first blocks of a stage (None: all; a tuple: of each stage)."""
    text = text.strip().lower()
    block, layers = re.search(r"full/block/(\d+)", text), re.search(r"layers=\[([\d,\s]+)\]", text)
    if layers:
        return "full", tuple(int(number) for number in layers[1].split(","))
    if block:
        return "full", int(block[1])
    if text.startswith("full"):
        return "full", None
    # Megatron's kind computes the core of attention again, which a fused kernel does anyway.
    return ("selective", None) if text.startswith("selective") and (eager or "op" in text) else ("none", None)


def _sharded(row: Row, layout: Layout) -> Layout:
    """What the data ranks share out, from the words of the column."""
    text = row.get("zero_stage_or_fsdp", "").lower()
    level = re.search(r"zero-?(\d)", text.replace("~zero-1/3", "zero-1"))
    if "full_shard" in text or "fsdp2" in text or "megatron-fsdp" in text:
        zero = 3
    elif "shard_grad_op" in text or "zero-2-like" in text:
        zero = 2
    else:
        zero = int(level[1]) if level else 0
    ranks = layout.data_ranks
    group = re.search(r"shard (?:group )?(\d+)", text)
    shard = min(int(group[1]), ranks) if group else ranks
    threshold = re.search(r"optimizer_weight_shard_size'?: (\d+)", text)
    shard = min(int(threshold[1]), ranks) if threshold and int(threshold[1]) > 0 else shard
    return replace(layout, zero=zero if ranks > 1 else 0, shard=shard if ranks % shard == 0 else ranks)


def _cluster(row: Row, stack: str) -> ClusterSpec:
    chip = f"{row.get('chip', '')} {row.get('mem_gb_per_device', '')}".lower()
    name = next((name for pattern, name in _CHIPS if re.search(pattern, chip)), None)
    if name is None:
        raise SkippedRow(f"no profile for the chip {row.get('chip')!r}")
    cluster = load_cluster(name, stack)
    per_node = _count(row, "devices_per_node", cluster.devices_per_node)
    links = tuple(
        replace(link, devices=per_node) if link.devices == cluster.devices_per_node else link for link in cluster.links
    )
    speed = _network(row.get("inter_node_link", ""), per_node)
    if speed:
        links = (*links[:-1], replace(links[-1], bandwidth=speed))
    return replace(cluster, devices_per_node=per_node, links=links)


def _network(text: str, per_node: int) -> float | None:
    """Bytes/s of a device between nodes, from words such as ``8x HDR IB 200Gb/s`` or ``800 Gb/s per node``."""
    found = re.search(r"(?:(\d+)x)?[^\d]*?(\d+)\s?Gb/s( per node)?", text)
    if not found or "NVL" in text:
        return None
    total = int(found[2]) * (int(found[1]) if found[1] else (1 if found[3] else per_node))
    return total * 1e9 / 8 / per_node


def _counted(kind: str) -> Literal["tensors", "first step", "allocator", "device"]:
    kind = kind.lower()
    if "reported ranks" in kind:  # Megatron prints them once, after the first step
        return "first step"
    if "reserved" in kind:
        return "allocator"
    return "tensors" if "allocated" in kind or "peak mem" in kind else "device"


def _memory(row: Row) -> float | None:
    gib = _measured(row, "peak_mem_gib")
    return gib * 2**30 if gib else None


def _precision(row: Row) -> str:
    """By its name; the containers that Megatron runs in let fp32 products use TF32, plain torch does not."""
    text = row.get("precision", "").lower()
    framework = row.get("framework", "").lower()
    if "tf32" in text or ("fp32" in text and "megatron" in framework):
        return "tf32"
    for word, name in (("fp4", "fp4"), ("fp8", "fp8"), ("float8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16")):
        if word in text:
            return name
    return "fp32" if "fp32" in text else "bf16"


def _number(row: Row, name: str) -> float | None:
    text = (row.get(name) or "").strip()
    try:
        number = float(text) if text else None
    except ValueError:
        number = nan
    if number is not None and not isfinite(number):
        raise SkippedRow(f"{name} = {text!r} is no number")
    return number


def _measured(row: Row, name: str) -> float | None:
    """A measured value; None where there is none.

    Raises:
        SkippedRow: it is not above 0, as tables have it for a run that failed.
    """
    number = _number(row, name)
    if number is not None and number <= 0:
        raise SkippedRow(f"{name} = {number:g} is not above 0")
    return number


def _count(row: Row, name: str, default: int | None = None) -> int:
    number = _number(row, name)
    if number is None:
        if default is None:
            raise SkippedRow(f"{name} is empty")
        return default
    if number < 0 or (number < 1 and default != 0):
        raise SkippedRow(f"{name} = {number:g} must be above 0")
    if number > _MOST:
        raise SkippedRow(f"{name} = {number:g} is above {_MOST:g}")
    if name == "n_layers" and number > _MOST_LAYERS:
        raise SkippedRow(f"n_layers = {number:g} is above {_MOST_LAYERS}")
    return int(number)
