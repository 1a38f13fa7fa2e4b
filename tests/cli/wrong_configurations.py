"""Wrong configurations, each with the words that its one message must hold; used by every way in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.spec.model_folder import make_folder


@dataclass(frozen=True)
class Wrong:
    """``overrides`` come after :func:`good`; ``{root}`` in them is the folder that :func:`make_root` filled."""

    name: str
    overrides: tuple[str, ...]
    words: tuple[str, ...]

    def arguments(self, root: Path) -> list[str]:
        return [*good(root), *(text.replace("{root}", str(root)) for text in self.overrides)]


def make_root(root: Path) -> Path:
    """Model folders, rows and output folders that the table refers to; no weights, no torch."""
    for name, changes in {
        "tiny": {},
        "nine-heads": {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
        "t5": {"model_type": "t5", "is_encoder_decoder": True},
        "experts": {"model_type": "mixtral", "architectures": None, "num_local_experts": 4},
        "bad-heads": {"hidden_size": 34},
        "quantised": {"quantization_config": {"bits": 4}},
    }.items():
        make_folder(root / name, **changes)
    make_folder(root / "pickled", weights="pytorch_model.bin")
    make_folder(root / "weightless", weights=None)
    (root / "no-config").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{", encoding="utf-8")
    (root / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n' * 8, encoding="utf-8")
    (root / "used" / "export").mkdir(parents=True)
    make_folder(root / "used" / "export")
    return root


def good(root: Path) -> list[str]:
    """A configuration with nothing wrong in it."""
    return [f"model={root}/tiny", f"data.train={root}/rows.jsonl", f"output_dir={root}/out", "device=cpu"]


def _row(name: str, overrides: str, *words: str) -> Wrong:
    return Wrong(name, tuple(overrides.split(";")), words)


WRONG = [
    _row("unknown key", "trian.epochs=2", "trian", "unknown key", "train"),
    _row("unknown deep key", "strategy.tpp=2", "strategy.tpp = 2", "unknown key", "strategy.tp?"),
    _row("key of another section", "learning_rate=1e-4", "unknown key", "train.learning_rate?"),
    _row("not an integer", "train.max_steps=many", "train.max_steps = 'many'", "integer"),
    _row("degree zero", "tp=0", "strategy.tp = 0", "greater than 0"),
    _row("a sequence for no ranks", "sequence_parallel=true", "sequence_parallel = true", "tp is 1", "strategy.tp=2"),
    _row("weights whole on no ranks", "tp_whole=0.3", "strategy.tp_whole = 0.3", "not given", "strategy.tp=2"),
    _row("more than all weights whole", "tp=2;tp_whole=1.5", "strategy.tp_whole = 1.5", "less than or equal to 1"),
    _row("unknown optimizer", "train.optimizer=adam", "'adamw' or 'sgd'", "adamw?"),
    _row("negative learning rate", "train.learning_rate=-0.1", "train.learning_rate = -0.1"),
    _row("lora without targets", "lora.target_modules=[]", "lora.target_modules", "names no module", "q_proj"),
    _row("lora pattern is broken", "lora.target_modules='(q_proj'", "lora.target_modules", "no regular expression"),
    _row("lora scaled by zero", "lora.alpha=0", "lora.alpha = 0", "lora.alpha: 16"),
    _row("lora switched off and on", "use_lora=false;lora.r=4", "use_lora = false", "contradict"),
    _row("lora of rank zero", "lora.r=0", "lora.r = 0", "greater than 0"),
    _row("packing and grouping", "data.packing=true;data.group_by_length=true", "group_by_length", "one of them"),
    _row("grouping in file order", "data.shuffle=false;data.group_by_length=true", "data.shuffle = false", "the file"),
    _row("feature not built: context parallel", "cp=2", "strategy.cp = 2", "not available in this version"),
    _row(
        "compiled adapters with dropout", "train.compile=true;lora.dropout=0.1", "lora.dropout = 0.1", "compile: false"
    ),
    _row("unknown precision", "train.precision=fp16", "train.precision", "'fp32' or 'bf16'"),
    _row("epochs and max_steps", "train.epochs=1;train.max_steps=2", "train.epochs = 1", "train.max_steps = 2"),
    _row("save steps without number", "save.strategy=steps", "save.strategy", "save.steps"),
    _row("evaluation without rows", "eval.strategy=epoch", "eval.strategy", "data.eval"),
    _row("tokenizer that is not there", "tokenizer=nosuch folder", "tokenizer = 'nosuch folder'", "no such folder"),
    _row("template that is not there", "chat_template=nofile.jinja", "chat_template = nofile.jinja", "No such file"),
    _row("tp does not divide the heads", "tp=3", "strategy.tp = 3", "4 attention heads", "1, 2, 4"),
    _row("tp 2 of nine heads", "model={root}/nine-heads;tp=2", "9 attention heads", "legal degrees: 1, 3, 9"),
    _row("more stages than blocks", "pp=5", "strategy.pp = 5", "4 blocks", "1 to 4"),
    _row("several stages under 1f1b", "pp=2;virtual_stages=2", "virtual_stages = 2", "is 1f1b", "interleaved"),
    _row("interleaved on one rank", "schedule=interleaved", "interleaved", "strategy.pp is 1", "strategy.pp=2"),
    _row("halves on one rank", "schedule=zero_bubble", "zero_bubble", "strategy.pp is 1", "strategy.pp=2"),
    _row("halves of two chunks", "pp=2;schedule=zero_bubble;virtual_stages=2", "virtual_stages = 2", "is zero_bubble"),
    _row(
        "compiled halves",
        "pp=2;schedule=zero_bubble;train.compile=true",
        "train.compile = true",
        "zero_bubble",
        "compile=false",
    ),
    _row("more chunks than blocks", "pp=2;schedule=interleaved;virtual_stages=3", "4 blocks", "virtual_stages=2"),
    _row("stages do not sum", "pp=2;stages=[2, 3]", "[2, 3]", "sums to 5", "[2, 2]"),
    _row("stages do not match pp", "pp=2;stages=[1, 1, 2]", "3 entries", "[2, 2]"),
    _row("product is not devices", "devices=3;tp=2;dp=2", "devices = 3", "is 4", "devices=4"),
    _row("degree does not divide devices", "devices=6;tp=4", "devices = 6", "devices=4 or devices=8"),
    _row("dp contradicts dp_shard", "dp=4;dp_shard=3", "strategy.dp = 4", "strategy.dp_shard = 3"),
    _row("batch", "dp=4;micro_batch_size=2;train.global_batch_size=10", "= 10", "8 or 16"),
    _row("recompute too many", "recompute=9", "strategy.recompute = 9", "at most 4"),
    _row("no such model", "model={root}/none", "no such model folder", "none"),
    _row("model folder without config", "model={root}/no-config", "holds no config.json"),
    _row("broken config", "model={root}/broken", "config.json", "not valid JSON"),
    _row("no decoder", "model={root}/t5", "t5", "is_encoder_decoder", "not available in this version", "llama"),
    _row("experts compiled", "model={root}/experts;train.compile=true", "train.compile = true", "4 experts", "false"),
    _row("experts and heads", "model={root}/experts;tp=3", "strategy.tp = 3", "attention heads", "legal degrees: 1, 2"),
    _row("heads do not divide hidden", "model={root}/bad-heads", "hidden_size = 34", "32, 36"),
    _row("quantised", "model={root}/quantised", "quantization_config", "not available in this version"),
    _row("pickled weights", "model={root}/pickled", "pytorch_model.bin", "safetensors"),
    _row("no weights", "model={root}/weightless", "safetensors", "model_init=random"),
    _row("no such data", "data.train={root}/none.jsonl", "none.jsonl", "no such file"),
    _row("rows set apart twice", "data.val_size=0.5;data.eval={root}/rows.jsonl", "data.val_size = 0.5", "one of them"),
    _row("unknown format", "data.format=shargpt", "data.format = 'shargpt'", "sharegpt?"),
    _row("output of another run", "output_dir={root}/used", "is not empty", "resume=auto", "overwrite=true"),
    _row("output is a file", "output_dir={root}/rows.jsonl", "rows.jsonl", "is a file"),
    _row(
        "overwrite deletes the model", "output_dir={root}/used;model={root}/used/export;overwrite=true", "would delete"
    ),
    _row("overwrite and resume", "overwrite=true;resume=auto", "overwrite = true", "resume = 'auto'"),
    _row("early stopping without evaluation", "train.early_stopping_patience=2", "patience = 2", "eval.strategy"),
    _row("unknown tracker", "log.report_to=[tensorbord]", "'tensorbord'", "tensorboard?"),
    _row("profile steps malformed", "log.profile_steps=3..5", "'3..5'", "3-5,9"),
    _row("profile steps backward", "log.profile_steps=5-3", "runs backward", "3-5"),
    _row("profile steps twice", "log.profile_steps=3-5,4", "step 4 is named twice"),
    _row("profile steps from zero", "log.profile_steps=0", "counted from 1"),
    _row("profile steps out of range", "log.profile_steps=3,7;train.max_steps=5", "'3,7'", "has 5 steps", "1 to 5"),
    _row("no such checkpoint", "resume={root}/step-00000010", "step-00000010", "no such checkpoint"),
    _row("machines without a meeting point", "nnodes=2;devices=4", "nnodes = 2", "rdzv_endpoint"),
    _row("machine out of range", "nnodes=2;node_rank=2;rdzv_endpoint=h:1", "node_rank = 2", "0 to 1"),
    _row("endpoint without port", "nnodes=2;rdzv_endpoint=host", "rdzv_endpoint = 'host'", "HOST:PORT"),
    _row("endpoint for one machine", "rdzv_endpoint=host:1", "rdzv_endpoint = 'host:1'", "nnodes"),
    _row("devices over machines", "nnodes=2;rdzv_endpoint=h:1;devices=5", "devices = 5", "devices=4 or 6"),
    _row("unknown parallel_config", "parallel_config.pipeline_stges=2", "pipeline_stges", "pipeline_stage?"),
    _row("parallel_config contradicts", "parallel_config.model_parallel=2;tp=4", "model_parallel = 2", "tp = 4"),
    _row("absent device", "device=npu", "device = 'npu'", "device=cpu", "SHARDWISE_DEVICE=cpu"),
]
