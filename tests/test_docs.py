"""The README and the docs: every command works, both languages say the same, the reference matches the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.api import fields
from shardwise.config import apply_overrides
from shardwise.errors import ConfigError
from shardwise.front import training
from shardwise.front.resolve import prepare
from shardwise.spec import aliases, rules
from shardwise.spec.plan import Plan
from shardwise.spec.run import LoraConfig
from tests.check.commands import checks_a_plan, shows_a_model
from tests.checkpoint.commands import exports_a_checkpoint
from tests.data.commands import prepares_data, shows_data
from tests.fixtures import make_model, make_rows
from tests.measure.commands import MEASURING
from tests.parallel.lora_harness import make_adapter
from tests.planner.commands import calibrates, estimates_runs, plans_a_model

ROOT = Path(__file__).resolve().parents[1]
PAIRS = [(ROOT / "README.md", ROOT / "README.zh.md")] + [
    (path, ROOT / "docs/zh" / path.name) for path in sorted((ROOT / "docs/en").glob("*.md"))
]
PAGES = [page for pair in PAIRS for page in pair]
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every code block."""
    return CODE.findall(read(page))


def prose(page: Path) -> str:
    return CODE.sub("", read(page))


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", prose(page))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands() -> list[str]:
    """Every line of every bash block, each once."""
    lines = [
        line for page in PAGES for language, text in blocks(page) if language == "bash" for line in text.split("\n")
    ]
    return list(dict.fromkeys(line.strip() for line in lines if line.strip()))


# Stand-ins: a folder in which the names that the docs use (DIR, FILE.jsonl, run.yaml) are there, but tiny.


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_DEVICE", "cpu")
    monkeypatch.delenv("SHARDWISE_MODELS_DIR", raising=False)
    make_model(tmp_path / "DIR", "llama")
    (tmp_path / "FILE.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(yaml_block(), encoding="utf-8")
    return tmp_path


def yaml_block() -> str:
    (text,) = (text for language, text in blocks(ROOT / "README.md") if language == "yaml")
    return text


def add_examples(workspace: Path) -> None:
    """The examples, with a tiny model that has as many heads and blocks as the one they name."""
    shutil.copytree(ROOT / "examples", workspace / "examples")
    sizes = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    make_model(workspace / "models/SmolLM2-135M-Instruct", "llama-tied", **sizes)


def add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["?", "<s>", "</s>", "Why", "is", "a", "model", "split"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="?").save_pretrained(folder)


# How each command is checked. A command of the docs that is not in COMMANDS fails the tests.


def resolved(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Parse a ``shardwise train`` command line as the command itself does, and resolve it; nothing is launched."""
    plans: list[Plan] = []

    def stop_after_prepare(tree: dict[str, Any]) -> int:
        plans.append(prepare(tree)[1])
        return 0

    monkeypatch.setattr(training, "train", stop_after_prepare)
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (plan,) = plans
    return plan


def is_valid_run(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(command)
    assert program == "shardwise"
    add_examples(workspace)
    plan = resolved(words, monkeypatch)
    for word in words:
        axis, _, degree = word.partition("=")
        if axis in ("tp", "pp"):
            assert getattr(plan.strategy, axis) == int(degree)


def runs_a_plan(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another run; tests/front/test_given_plan.py really trains."""
    saved = resolved(shlex.split(f"{PLAIN_RUN} tp=2 dp_shard=1")[1:], monkeypatch)
    saved.save(workspace / "plan.json")
    assert resolved(shlex.split(command)[1:], monkeypatch) == saved


def is_valid_where_there_is_a_compiler(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.front.compiler.missing_for_compiling", lambda device: "")
    is_valid_run(command, workspace, monkeypatch)


def is_valid_resume(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on from what ``shardwise train --model DIR ...`` has written; the slow test below really trains."""
    run = workspace / shlex.split(command)[2]
    run.parent.mkdir(parents=True)
    run.write_text(yaml_block(), encoding="utf-8")
    is_valid_run(command, workspace, monkeypatch)


def shows_help(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert result.exit_code == 0
    assert "Usage" in result.output


def answers(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, subcommand, folder, prompt = shlex.split(command)
    assert subcommand == "generate"
    shutil.copytree(workspace / "DIR", workspace / folder)
    add_tokenizer(workspace / folder)
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.startswith(f"> {prompt}\n")


def merges(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, source, out = shlex.split(command)
    make_adapter(workspace / "DIR", workspace / source / "export", LoraConfig(r=2))
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == f"{out}\n"
    assert "difference of logits" in result.stderr
    assert (workspace / out / "model.safetensors").is_file()


def recipe(target: str) -> str:
    """What make would run, with nothing built yet."""
    # VIRTUAL_ENV names a folder that is not there, so that every step is listed.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    environment["VIRTUAL_ENV"] = "no-such-environment"
    command = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), target]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def makes_a_valid_run(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = re.findall(r"-m shardwise\.cli (.*)", recipe(command.split()[1]))
    is_valid_run(f"shardwise {line}", workspace, monkeypatch)


def makes_pytest(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = recipe(command.split()[1])
    assert re.search(r"-m pytest", lines)
    assert ("ruff check" in lines) == (command == "make check")


def names_the_environment(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = re.fullmatch(r"source (.+)/bin/activate", command)
    assert folder
    assert f"VENV := {folder[1]}\n" in read(ROOT / "Makefile")


def starts_a_script(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, by torchrun or by us: the script is there, and the entries are keys. tests/examples runs them."""
    from shardwise.launch import contact

    add_examples(workspace)
    program, *words = shlex.split(command)
    if program != "shardwise":
        script = next(word for word in words if word.endswith(".py"))
        assert (workspace / script).is_file()
        assert program in ("python", "torchrun")
        return
    started: list[tuple[Path, list[str], list[str]]] = []
    monkeypatch.setattr(contact, "run_script", lambda *arguments: started.append(arguments))
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    ((path, arguments, entries),) = started
    assert path.is_file()
    assert words[-len(arguments) :] == arguments or not arguments
    assert rules.parse_run(apply_overrides({"model": "x"}, entries))


Check = Callable[[str, Path, pytest.MonkeyPatch], None]
BEST_RUN = "shardwise train run.yaml data.eval=FILE.jsonl eval.strategy=epoch save.strategy=epoch save.best=eval_loss"
LEAST_RATE = "train.lr_scheduler_kwargs.min_lr_rate=0.1"
PLAIN_RUN = "shardwise train --model DIR --data FILE.jsonl"
SPLIT_RUN = f"{PLAIN_RUN} tp=2 pp=2"
OWN_RUN = f"{SPLIT_RUN} output_dir=output/mine"
SAVING_RUN = f"{SPLIT_RUN} save.strategy=steps save.steps=100 output_dir=output/long"
RESUMED_RUN = "shardwise train output/long/run.yaml resume=auto"
EXAMPLE = "examples/train.py models/SmolLM2-135M-Instruct examples/data/chat.jsonl"
MEETING = "rdzv_endpoint=10.0.0.1:29400"
GENERATE = 'shardwise generate output/mine/export "Why is a model split?"'
CHECK = "shardwise check run.yaml"
COMMANDS: dict[str, Check] = {
    "make train": makes_a_valid_run,
    "make test": makes_pytest,
    "make check": makes_pytest,
    "source .venv/bin/activate": names_the_environment,
    OWN_RUN: is_valid_run,
    SAVING_RUN: is_valid_run,
    "shardwise train --model DIR --data FILE.jsonl pp=2 dp_shard=2": is_valid_run,
    RESUMED_RUN: is_valid_resume,
    f"{PLAIN_RUN} tp=2 train.precision=bf16 output_dir=output/bf16": is_valid_run,
    f"{PLAIN_RUN} tp=2 sequence_parallel=true": is_valid_run,
    f"{PLAIN_RUN} tp=2 tp_whole=0.22": is_valid_run,
    f"{PLAIN_RUN} dp_replicate=2 gradient_aggregation_group=4": is_valid_run,
    f"{PLAIN_RUN} pp=2 schedule=interleaved virtual_stages=2": is_valid_run,
    f"{PLAIN_RUN} pp=2 schedule=zero_bubble": is_valid_run,
    f"{PLAIN_RUN} train.compile=true": is_valid_where_there_is_a_compiler,
    f"{PLAIN_RUN} pp=2 dp_shard=2": is_valid_run,
    "shardwise train run.yaml": is_valid_run,
    "shardwise train run.yaml tp=1 pp=4 overwrite=true": is_valid_run,
    "shardwise train run.yaml tp=2 train.epochs=1": is_valid_run,
    "shardwise train examples/pipeline_data.yaml": is_valid_run,
    "shardwise train examples/llama2-7b-lora.yaml": is_valid_run,
    "shardwise train run.yaml log.report_to=tensorboard": is_valid_run,
    "shardwise train run.yaml data.eval=FILE.jsonl eval.strategy=epoch train.early_stopping_patience=2": is_valid_run,
    f"{BEST_RUN} save.export=best": is_valid_run,
    f"shardwise train run.yaml train.lr_scheduler=cosine_with_min_lr {LEAST_RATE}": is_valid_run,
    "shardwise train run.yaml log.profile_steps=3-5": is_valid_run,
    "shardwise train run.yaml data.packing=true data.max_length=64 train.global_batch_size=32": is_valid_run,
    "shardwise train run.yaml data.group_by_length=true": is_valid_run,
    "shardwise train run.yaml data.loss=last_turn": is_valid_run,
    "shardwise train --help": shows_help,
    f"shardwise train --model DIR --data FILE.jsonl nnodes=2 node_rank=0 {MEETING} devices=16 pp=2": is_valid_run,
    f"python {EXAMPLE}": starts_a_script,
    f"shardwise run --device cpu {EXAMPLE}": starts_a_script,
    "shardwise run --device cpu --set tp=3 --set pp=1 --set dp_shard=1 examples/train.py DIR FILE.jsonl": (
        starts_a_script
    ),
    "torchrun --nproc-per-node 4 examples/train.py DIR FILE.jsonl": starts_a_script,
    "shardwise run --devices 16 --set nnodes=2 --set node_rank=1 "
    f"--set {MEETING} examples/train.py DIR FILE.jsonl": starts_a_script,
    "shardwise run --device cpu --models-dir models examples/mindspore_style.py": starts_a_script,
    GENERATE: answers,
    f"{SPLIT_RUN} use_lora=true output_dir=output/lora": is_valid_run,
    "shardwise export --merge output/lora merged": merges,
    "shardwise export output/long exported --verify --max-shard-size 2GB": exports_a_checkpoint,
    "shardwise train run.yaml save.strategy=steps save.steps=100 save.keep=2 save.async=true": is_valid_run,
    "shardwise train run.yaml save.strategy=steps save.steps=100 restarts=3": is_valid_run,
    CHECK: checks_a_plan,
    f"{CHECK} tp=2 pp=2 --json": checks_a_plan,
    "shardwise estimate --runs runs.csv": estimates_runs,
    "shardwise estimate --runs runs.csv --json": estimates_runs,
    "shardwise estimate --runs runs.csv --calibrate mine.json": calibrates,
    "shardwise plan --model llama2-7b --cluster ascend-910b2 --devices 16": plans_a_model,
    "shardwise plan --model llama2-7b --cluster a100-80gb --devices 16 --fix tp=2 "
    "train.global_batch_size=64 data.max_length=2048": plans_a_model,
    "shardwise plan --model llama2-7b --cluster a100-80gb --devices 8 --memory 40GiB --top 3 --json": plans_a_model,
    "shardwise plan --model llama2-7b --cluster ascend-910b2 --devices 8 --explain": plans_a_model,
    "shardwise plan --model llama3-8b --cluster h100-80gb --devices 8 --memory 10TiB tp=8 sequence_parallel=false "
    "train.global_batch_size=8 data.max_length=4096": plans_a_model,
    "shardwise train run.yaml cluster=cpu devices=4": is_valid_run,
    f"{PLAIN_RUN} devices=4": is_valid_run,
    **MEASURING,
    "shardwise model show DIR": shows_a_model,
    "shardwise model show llama2-70b": shows_a_model,
    f"{PLAIN_RUN} strategy.plan=plan.json": runs_a_plan,
    "shardwise model show DIR --tp 2 --json": shows_a_model,
    "shardwise data show FILE.jsonl --model DIR": shows_data,
    "shardwise data show run.yaml --rows 1 --json": shows_data,
    "shardwise data prepare run.yaml": prepares_data,
}


def test_every_command_has_a_check() -> None:
    assert sorted(commands()) == sorted(COMMANDS)


# They plan, for which a child reads the model.
SLOW = ("shardwise train run.yaml cluster=cpu devices=4", f"{PLAIN_RUN} devices=4")


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=pytest.mark.slow if command in SLOW else ()) for command in COMMANDS]
)
def test_command(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    COMMANDS[command](command, workspace, monkeypatch)


def test_commands_stand_in_bash_blocks() -> None:
    """A command in a block of another language would escape the table."""
    for page in PAGES:
        for language, text in blocks(page):
            assert language in ("bash", "yaml", "text", "json", "python"), (
                f"{name(page)}: a block of {language or 'no language'}"
            )
            if language != "bash":
                assert not re.search(r"^\s*(\$ )?(shardwise|make|python|pip) ", text, re.MULTILINE), name(page)


def test_python_blocks_stand_in_an_example() -> None:
    """So they are run by the tests of the examples."""
    examples = [textwrap.dedent(read(path)) for path in (ROOT / "examples").glob("*.py")]
    bodies = [re.sub(r"^    ", "", text, flags=re.MULTILINE) for text in examples]
    for page in PAGES:
        for language, text in blocks(page):
            assert language != "python" or any(text in body for body in bodies), name(page)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_field_of_training_arguments_is_listed(language: str) -> None:
    page = read(ROOT / f"docs/{language}/scripts.md")
    for field in (*fields.HONOURED, *fields.HARMLESS, *fields.REFUSED):
        assert f"`{field}`" in page, field


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_name_of_mindformers_is_listed(language: str) -> None:
    page = read(ROOT / f"docs/{language}/contract.md")
    for alias, key in aliases.KEYS.items():
        assert f"| `{alias}` | `{key}` |" in page


def test_a_wrong_command_is_noticed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        is_valid_run(f"{OWN_RUN} train.epoch=1", workspace, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)  # three commands, each of which imports torch and transformers
def test_the_commands_of_the_readme_train_save_resume_and_answer(workspace: Path) -> None:
    """The reader's own run, with two steps instead of three epochs, then two more, then a question."""
    add_tokenizer(workspace / "DIR")
    first = run_command(f"{SAVING_RUN} save.steps=1 train.max_steps=2")
    assert first.stdout.strip() == "output/long/export"
    run_command(f"{RESUMED_RUN} train.max_steps=4")
    lines = [json.loads(line) for line in read(workspace / "output/long/metrics.jsonl").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert json.loads(read(workspace / "output/long/status.json"))["state"] == "done"
    assert run_command(GENERATE.replace("mine", "long")).stdout.startswith("> Why is a model split?\n")


def run_command(command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "shardwise.cli", *shlex.split(command)[1:]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


# Both languages.


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[name(english) for english, _ in PAIRS])
def test_languages_are_in_step(english: Path, chinese: Path) -> None:
    assert blocks(english) == blocks(chinese)
    assert headings(english) == headings(chinese)
    assert [common(link) for link in links(english)] == [common(link) for link in links(chinese)]
    assert table_widths(english) == table_widths(chinese)
    assert len(list_items(english)) == len(list_items(chinese))


def test_no_page_without_its_other_language() -> None:
    assert {p.name for p in (ROOT / "docs/zh").glob("*.md")} == {p.name for p in (ROOT / "docs/en").glob("*.md")}


def headings(page: Path) -> list[int]:
    """The level of each heading, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.MULTILINE)]


def common(link: str) -> str:
    return link.replace("README.zh.md", "README.md").replace("zh/", "en/")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table_widths(page: Path) -> list[int]:
    """Number of cells of each table row, in order."""
    return [len(cells(line)) for line in prose(page).splitlines() if line.startswith("|")]


def list_items(page: Path) -> list[str]:
    return re.findall(r"^- .*", prose(page), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_internal_links_exist(page: Path) -> None:
    for link in links(page):
        if not link.startswith("https://"):
            assert (page.parent / link).is_file(), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_the_text_names_exist(page: Path) -> None:
    """``parallel/engine.py`` and ``spec/layout.ParamLayout`` are places in the package."""
    for room, module, attribute in re.findall(r"`(\w+)/(\w+)(?:\.(\w+))?`", prose(page)):
        path = ROOT / "shardwise" / room / f"{module}.py"
        if (ROOT / "shardwise" / room).is_dir():
            assert path.is_file(), f"{name(page)}: {room}/{module}"
            assert attribute in ("", "py") or re.search(rf"^(class|def) {attribute}\b", read(path), re.MULTILINE)
