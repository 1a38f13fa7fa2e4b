"""The command line. Results go to stdout, all else to stderr; exit codes are those of the contract."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console

from shardwise.config import nearest
from shardwise.errors import ConfigError, ShardwiseError

EXIT_DIFFERENT = 4  # a comparison that was asked for found a difference
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="shardwise",
    help="Automatic model-parallel training of Hugging Face language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

model_app = typer.Typer(help="What a model is made of.", no_args_is_help=True)
app.add_typer(model_app, name="model")
data_app = typer.Typer(help="What rows become, before training on them.", no_args_is_help=True)
app.add_typer(data_app, name="data")

Command = TypeVar("Command", bound=Callable[..., None])


def _interruptible(command: Command) -> Command:
    """Answer Ctrl-C in one line; while a job runs, its launcher takes the signal."""

    @wraps(command)
    def run_command(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            print("stopped by SIGINT", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None

    return cast(Command, run_command)


@app.callback()
def _root() -> None:
    """Keeps `shardwise train` a command of its own."""


@app.command()
@_interruptible
def train(
    settings: Annotated[list[str] | None, typer.Argument(help="run.yaml and key=value overrides, in any order")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face model folder")] = None,
    data: Annotated[str | None, typer.Option(help="training rows, a file or a folder")] = None,
    devices: Annotated[int | None, typer.Option(help="number of processes")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or npu")] = None,
    output_dir: Annotated[str | None, typer.Option(help="where results go")] = None,
) -> None:
    """Train a model, split over processes as the strategy says."""
    options = {"model": model, "data.train": data, "devices": devices, "device": device, "output_dir": output_dir}
    from shardwise.front.training import train as run_training
    from shardwise.front.tree import run_tree

    raise typer.Exit(run_training(run_tree(settings or [], options)))


@app.command()
@_interruptible
def check(
    settings: Annotated[list[str] | None, typer.Argument(help="run.yaml and key=value overrides, in any order")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face model folder")] = None,
    devices: Annotated[int | None, typer.Option(help="number of processes of the run")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Prove the plan of a run on a small copy of its model, on a few CPU processes, against one process."""
    from shardwise.front.checking import run_check
    from shardwise.front.tree import run_tree
    from shardwise.report.checking import show_check
    from shardwise.report.results import print_json, results_console

    result = run_check(run_tree(settings or [], {"model": model, "devices": devices}))
    if result.report is not None:
        if as_json:
            print_json(result.report)
        else:
            show_check(result.report, results_console())
    raise typer.Exit(result.exit_code)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@_interruptible
def run(
    script: Annotated[Path, typer.Argument(help="a Python file")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments of the script")] = None,
    devices: Annotated[int | None, typer.Option(help="number of processes, on all machines together")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or npu")] = None,
    models_dir: Annotated[str | None, typer.Option(help="a folder of models")] = None,
    output_dir: Annotated[str | None, typer.Option(help="where results go")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="any other key=value; may be repeated")] = None,
) -> None:
    """Run a script that uses shardwise on all devices; options win over what the script says."""
    from shardwise.launch.contact import run_script

    options = {"devices": devices, "device": device, "models_dir": models_dir, "output_dir": output_dir}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    run_script(script, arguments or [], [*given, *(setting or [])])


@app.command()
@_interruptible
def generate(
    folder: Annotated[Path, typer.Argument(help="a Hugging Face folder, such as a run's export")],
    prompts: Annotated[list[str], typer.Argument(help="one or more prompts")],
    max_new_tokens: Annotated[int, typer.Option(help="length of an answer at most")] = 64,
) -> None:
    """Answer prompts with a model, greedily, by plain transformers in one process."""
    from shardwise.models.generate import generate as answer
    from shardwise.spec.paths import check_path

    check_path("folder", str(folder))
    for prompt, text in zip(prompts, answer(folder, prompts, max_new_tokens), strict=True):
        print(f"> {prompt}\n{text}")


@app.command()
@_interruptible
def export(
    source: Annotated[Path, typer.Argument(help="a run's output folder, a checkpoint, or an adapter folder")],
    out: Annotated[Path, typer.Argument(help="folder for the export; not there yet, or empty")],
    merge: Annotated[bool, typer.Option("--merge", help="fold the adapter into its base model")] = False,
    base: Annotated[
        Path | None, typer.Option(help="base model, where the one that the adapter names has moved")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="compare logits with the model of the checkpoint")] = False,
    max_shard_size: Annotated[str | None, typer.Option(help="of a weight file, such as 2GB")] = None,
) -> None:
    """Write a Hugging Face folder from a checkpoint: the model, or of a LoRA run the adapter or both merged."""
    from shardwise.front.exporting import write_export

    comparison = write_export(source, out, merge=merge, base=base, verify=verify, max_shard_size=max_shard_size)
    if comparison is not None:
        print(comparison, file=sys.stderr, flush=True)
    print(out, flush=True)
    if comparison is not None and not comparison.agrees:
        raise typer.Exit(EXIT_DIFFERENT)


@app.command("estimate")
@_interruptible
def estimate_runs(
    runs: Annotated[str, typer.Option(help="a CSV file, one configuration a row")],
    calibrate: Annotated[
        Path | None, typer.Option(help="profile to write for plan --cluster, its software stack fitted to these runs")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Predict step time and memory of given configurations, and compare them with what was measured."""
    from shardwise.planner.accuracy import answer, predict, read_rows
    from shardwise.report.estimates import show_calibration, show_estimates
    from shardwise.report.results import print_json, results_console

    predictions = predict(read_rows(runs))
    found = answer(predictions)
    if calibrate is not None:
        from shardwise.front.planning import save_profile
        from shardwise.planner.calibrate import calibrate as fit

        fitted = fit(predictions)
        save_profile(fitted.cluster, calibrate, "--calibrate")
        found["calibration"] = fitted.answer()
    if as_json:
        print_json(found)
        return
    show_estimates(found, results_console())
    if calibrate is not None:
        show_calibration(found["calibration"], calibrate, results_console())


@app.command("plan")
@_interruptible
def plan_run(  # noqa: PLR0913  a parameter an option
    settings: Annotated[
        list[str] | None, typer.Argument(help="run.yaml and key=value: fields of strategy are fixed")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a model folder with config.json, or a well-known name")] = None,
    cluster: Annotated[str | None, typer.Option(help="profile of the devices, such as a100-80gb")] = None,
    devices: Annotated[int | None, typer.Option(help="number of devices, at most")] = None,
    fix: Annotated[list[str] | None, typer.Option(help="a degree that is given, as tp=8; may be repeated")] = None,
    memory: Annotated[str | None, typer.Option(help="of a device, such as 40GiB; else the profile's")] = None,
    top: Annotated[int, typer.Option(min=1, help="number of plans to show")] = 5,
    output: Annotated[Path, typer.Option(help="where the best plan is written")] = Path("plan.json"),
    explain: Annotated[bool, typer.Option("--explain", help="every term, rejection, and what would change it")] = False,
    html: Annotated[Path | None, typer.Option(help="a page with plots to write")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Find the fastest split of a model over devices that need not be here, and say why."""
    from shardwise.front.planning import check_outputs, make_job, save_page, save_plan
    from shardwise.front.tree import run_tree
    from shardwise.planner.explain import answer, what_would_change
    from shardwise.planner.search import search
    from shardwise.report.plan_page import plan_page
    from shardwise.report.plans import show_plans, show_reasons
    from shardwise.report.results import print_json, results_console

    check_outputs(output, html)
    tree = run_tree([*(settings or []), *(fix or [])], {"model": model, "cluster": cluster, "devices": devices})
    job = make_job(tree, os.environ, memory)
    found = search(job, top)
    changes = what_would_change(job, found) if explain else []
    if as_json:
        print_json(answer(job, found) | ({"what_would_change": changes} if explain else {}))
    else:
        console = results_console()
        show_plans(job, found, console)
        if explain:
            show_reasons(job, found, changes, console)
    if html is not None:
        save_page(plan_page(job, found), html)
    print(save_plan(job, found, output), file=sys.stderr)


@app.command("measure")
@_interruptible
def measure_machine(
    devices: Annotated[int | None, typer.Option(min=1, help="processes at once; else one a core")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few seconds, fewer sizes")] = False,
    show: Annotated[bool, typer.Option("--show", help="what was measured before; nothing is run")] = False,
    output: Annotated[Path | None, typer.Option(help="a profile to write, for --cluster")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Time what training is made of on this machine's CPU, and make the profile that plans are made with."""
    from shardwise.front.measuring import cluster_of, measured_here, profile_name
    from shardwise.front.planning import save_profile
    from shardwise.report.measured import measured_answer, show_measured
    from shardwise.report.results import print_json, results_console

    samples = measured_here(devices, "quick" if quick else "full", os.environ, show=show)
    if as_json:
        print_json(measured_answer(samples, profile_name(samples)))
    else:
        show_measured(samples, results_console())
    if output is not None:
        save_profile(cluster_of(samples), output, "--output")


@model_app.command("show")
@_interruptible
def model_show(
    folder: Annotated[
        str, typer.Argument(help="a Hugging Face folder (config.json is enough), a preset, or a model's name")
    ],
    tp: Annotated[
        list[int] | None, typer.Option(min=1, help="a tensor degree; may be repeated. Else all legal")
    ] = None,
    models_dir: Annotated[str | None, typer.Option(help="a folder of models")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Show what a model is made of, and how it can be split over tensor and pipeline ranks."""
    from shardwise.front.shown_model import shown_model
    from shardwise.report.models import show_model
    from shardwise.report.results import print_json, results_console

    answer = shown_model(folder, tp or [], models_dir or os.environ.get("SHARDWISE_MODELS_DIR"))
    if as_json:
        print_json(answer)
    else:
        show_model(answer, results_console())


@data_app.command("show")
@_interruptible
def data_show(
    data: Annotated[str, typer.Argument(help="rows, a file or a folder; or a run.yaml that names them")],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value, as for train")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder of the model and its tokenizer")] = None,
    rows: Annotated[int, typer.Option(min=0, help="number of rows to show")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Show rows as the model sees them, what is learned of them, their lengths, and the steps that follow."""
    from shardwise.front.preparing import prepare_data
    from shardwise.front.surveying import survey
    from shardwise.front.tree import data_tree
    from shardwise.report.data import show_data
    from shardwise.report.results import messages_console, print_json, results_console

    run, plan = prepare_data(data_tree(data, settings or [], model))
    answer = survey(run, plan, rows, os.environ, messages_console())
    if as_json:
        print_json(answer)
    else:
        show_data(answer, results_console())


@data_app.command("prepare")
@_interruptible
def data_prepare(
    data: Annotated[str, typer.Argument(help="rows, a file or a folder; or a run.yaml that names them")],
    settings: Annotated[list[str] | None, typer.Argument(help="key=value, as for train")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder of the model and its tokenizer")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="that tokenise at once; else one a core")] = None,
) -> None:
    """Tokenise rows ahead into the cache, where every later run with these settings finds them."""
    from shardwise.front.preparing import prepare_all, prepare_data
    from shardwise.front.tree import data_tree

    run, plan = prepare_data(data_tree(data, settings or [], model))
    for folder in prepare_all(run, plan, processes, os.environ, Console(stderr=True)):
        print(folder, flush=True)


# The base of the parser's errors, under whatever name this version of typer keeps it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def usage_message(error: Any) -> str:
    """A wrong use of the command line in one line, with the nearest option or command where one is near."""
    command = error.ctx.command_path if error.ctx else "shardwise"
    text = " ".join(error.format_message().split()).rstrip(".")
    if hasattr(error, "possibilities"):  # no such option: the parser's own nearest name looks at long ones alone
        known = [name for parameter in error.ctx.command.params for name in parameter.opts] if error.ctx else []
        near = nearest(error.option_name, [*known, "--help"])
        text = f"{error.option_name}: no such option" + (f". Did you mean {near}?" if near else "")
    return f"{text} ({command} --help lists what there is)"


def use_utf8() -> None:
    """Start this process again in UTF-8 mode if its locale has another encoding.

    Names of files in run.yaml are UTF-8, and under LC_ALL=C with PYTHONUTF8=0 the interpreter encodes no others.
    """
    if sys.getfilesystemencoding().lower().replace("-", "") == "utf8":
        return
    environment = os.environ | {"PYTHONUTF8": "1"}
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environment)


def main() -> None:
    """Entry point of the console script."""
    use_utf8()
    try:
        code = app(prog_name="shardwise", standalone_mode=False)
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a bare `shardwise` has shown its help
            sys.exit(ConfigError.exit_code)
        print(f"shardwise: {usage_message(error)}", file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    except typer.Abort:
        sys.exit(1)
    sys.exit(code)


if __name__ == "__main__":
    main()
