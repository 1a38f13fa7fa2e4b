"""``log.report_to``: TensorBoard's files are read back; the others are called as their packages declare it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shardwise.config import apply_overrides, load_yaml
from shardwise.errors import ConfigError
from shardwise.front import resolve
from shardwise.front.resolve import prepare
from shardwise.spec.run import RunConfig
from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.trackers import make_trackers, numbers
from tests.cli.wrong_configurations import good, make_root
from tests.train.runs import make_inputs, run


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _curves(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


@pytest.mark.slow
def test_tensorboard_has_every_number_of_the_metrics_and_goes_on_after_a_resume(inputs: Path, tmp_path: Path) -> None:
    evaluation = [f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=steps", "eval.steps=2"]
    saving = ["save.strategy=steps", "save.steps=2", "log.report_to=tensorboard"]
    base = ["pp=2", "train.global_batch_size=4", *evaluation, *saving]
    run(inputs, tmp_path / "out", [*base, "train.max_steps=2"])
    result = run(inputs, tmp_path / "out", [*base, "train.max_steps=4", "resume=auto"])
    assert result.errors == ["", ""]
    curves = _curves(tmp_path / "out" / "tensorboard")
    drawn = {tag: {event.step: event.value for event in curves.Scalars(tag)} for tag in curves.Tags()["scalars"]}
    lines = [*result.metrics(), *result.metrics("eval")]
    assert {name for line in lines for name in numbers(line)} == set(drawn)
    for line in lines:
        for name, value in numbers(line).items():
            assert drawn[name][line["step"]] == pytest.approx(value, rel=1e-6)
    assert sorted(drawn["train/loss"]) == [1, 2, 3, 4]
    assert sorted(drawn["eval/eval_loss"]) == [2, 4]
    (event, *_) = curves.Tensors("run.yaml/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    (tmp_path / "read.yaml").write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))
    assert RunConfig.model_validate(load_yaml(tmp_path / "read.yaml")).train.max_steps == 2


def test_numbers_are_what_can_be_drawn() -> None:
    line = {"kind": "train", "step": 3, "loss": None, "lr": 0.5, "num_rows": 4, "row_hashes": ["a"], "skipped": "why"}
    assert numbers(line) == {"train/lr": 0.5, "train/num_rows": 4.0}


# The other services. A stand-in has the signature of the real function, as far as it is used, and notes the call.

Calls = list[tuple[str, dict[str, Any]]]


def _wandb(calls: Calls) -> ModuleType:
    """wandb 0.31: ``wandb.init``, ``Run.log``, ``Run.finish``."""

    class Run:
        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            calls.append(("log", {"data": data, "step": step}))

        def finish(self, exit_code: int | None = None) -> None:
            calls.append(("finish", {"exit_code": exit_code}))

    def init(
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,  # noqa: A002
        id: str | None = None,  # noqa: A002
        name: str | None = None,
        config: dict[str, Any] | None = None,
        mode: str | None = None,
    ) -> Run:
        calls.append(("init", {"project": project, "dir": dir, "name": name, "config": config, "mode": mode}))
        return Run()

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    return module


def _swanlab(calls: Calls) -> ModuleType:
    """swanlab 0.10: ``init``, ``log``, ``finish``."""

    def init(
        *,
        reinit: bool | None = None,
        log_dir: str | None = None,
        mode: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        print("swanlab: Tracking run")  # as the real one does
        calls.append(("init", {"project": project, "dir": log_dir, "name": name, "config": config, "mode": mode}))

    def log(data: dict[str, Any], step: int | None = None) -> None:
        calls.append(("log", {"data": data, "step": step}))

    def finish(state: str = "success", error: str | None = None, async_log_timeout: int | None = None) -> None:
        print("swanlab: Run `swanlab sync` to sync this run")
        calls.append(("finish", {"state": state, "error": error}))

    module = ModuleType("swanlab")
    module.init, module.log, module.finish = init, log, finish  # type: ignore[attr-defined]
    return module


def _mlflow(calls: Calls) -> ModuleType:
    """mlflow 3.17: the fluent functions."""

    def is_tracking_uri_set() -> bool:
        return False

    def set_tracking_uri(uri: str) -> None:
        calls.append(("uri", {"uri": uri}))

    def set_experiment(experiment_name: str | None = None, experiment_id: str | None = None) -> None:
        calls.append(("experiment", {"name": experiment_name}))

    def start_run(run_id: str | None = None, experiment_id: str | None = None, run_name: str | None = None) -> None:
        calls.append(("init", {"name": run_name}))

    def log_params(params: dict[str, Any], synchronous: bool | None = None, run_id: str | None = None) -> None:
        calls.append(("params", params))

    def log_metrics(metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None) -> None:
        calls.append(("log", {"data": metrics, "step": step}))

    def end_run(status: str = "FINISHED") -> None:
        calls.append(("finish", {"status": status}))

    module = ModuleType("mlflow")
    for function in (
        is_tracking_uri_set,
        set_tracking_uri,
        set_experiment,
        start_run,
        log_params,
        log_metrics,
        end_run,
    ):
        setattr(module, function.__name__, function)
    return module


STAND_INS = {"wandb": _wandb, "swanlab": _swanlab, "mlflow": _mlflow}
TRAIN_LINE = {"kind": "train", "step": 7, "loss": 2.5, "mfu": None, "skipped": "no"}
EVAL_LINE = {"kind": "eval", "step": 7, "eval_loss": 2.0, "eval_tokens": 12}


def _info(folder: Path) -> RunInfo:
    config = RunConfig.model_validate({"model": "m", "train": {"seed": 5}})
    return RunInfo(config, folder, rank=0, world_size=1, first_step=0, total_steps=9, model=None)


def _calls(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, **environ: str
) -> Calls:
    """What a tracker does in a short run that ends well, or by ``error``."""
    calls: Calls = []
    monkeypatch.setitem(sys.modules, name, STAND_INS[name](calls))
    (tracker,) = make_trackers((name,), environ)
    tracker.on_train_begin(_info(folder))
    tracker.on_step_end(7, TRAIN_LINE)
    tracker.on_evaluate(EVAL_LINE)
    if error is None:
        tracker.on_train_end(None)
    else:
        tracker.on_exception(error)
    return calls


@pytest.mark.parametrize("name", STAND_INS)
def test_a_service_is_told_the_numbers_and_the_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = _calls(name, tmp_path, monkeypatch)
    assert capsys.readouterr().out == ""
    assert [arguments for kind, arguments in calls if kind == "log"] == [
        {"data": {"train/loss": 2.5}, "step": 7},
        {"data": {"eval/eval_loss": 2.0, "eval/eval_tokens": 12.0}, "step": 7},
    ]
    (begun,) = (arguments for kind, arguments in calls if kind == "init")
    assert begun["name"] == tmp_path.name
    if name == "mlflow":
        assert ("uri", {"uri": f"sqlite:///{tmp_path}/mlflow.db"}) in calls
        (parameters,) = (arguments for kind, arguments in calls if kind == "params")
        assert parameters["train.seed"] == 5
    else:
        assert begun["config"]["train"]["seed"] == 5
        assert begun["mode"] == "offline"
        assert Path(begun["dir"]).is_relative_to(tmp_path)


@pytest.mark.parametrize(("name", "variable"), [("wandb", "WANDB_MODE"), ("swanlab", "SWANLAB_MODE")])
def test_a_service_goes_online_by_its_own_variable(
    name: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (begun,) = (a for kind, a in _calls(name, tmp_path, monkeypatch, **{variable: "online"}) if kind == "init")
    assert begun["mode"] == "online"


@pytest.mark.parametrize(
    ("name", "well", "badly"),
    [
        ("wandb", {"exit_code": 0}, {"exit_code": 1}),
        ("swanlab", {"state": "success", "error": None}, {"state": "crashed", "error": "ValueError: no"}),
        ("mlflow", {"status": "FINISHED"}, {"status": "FAILED"}),
    ],
)
def test_a_service_learns_how_the_run_ended(
    name: str, well: dict[str, Any], badly: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _calls(name, tmp_path, monkeypatch)[-1] == ("finish", well)
    assert _calls(name, tmp_path, monkeypatch, ValueError("no"))[-1] == ("finish", badly)


def _breaking(rank: int) -> list[Callback]:
    """Puts a wandb in place whose connection breaks at the second step."""
    calls: Calls = []
    module = _wandb(calls)
    real_init = module.init

    def init(**arguments: Any) -> Any:
        begun = real_init(**arguments)
        begun.log = log  # type: ignore[method-assign]
        return begun

    def log(data: dict[str, Any], step: int | None = None) -> None:
        if step == 2:
            raise ConnectionError("the service is gone")

    module.init = init  # type: ignore[attr-defined]
    sys.modules["wandb"] = module
    return []


@pytest.mark.slow
def test_a_service_that_breaks_costs_the_run_nothing(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "check_trackers", lambda *_, **__: None)
    overrides = ["tp=2", "train.max_steps=4", "log.report_to=wandb"]
    result = run(inputs, tmp_path / "out", overrides, _breaking)
    assert result.errors == ["", ""]
    assert result.terminal.count("WandB.on_step_end raised ConnectionError: the service is gone") == 1
    assert result.terminal.count("WandB") == 2
    assert result.status().step == 4


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "swanlab", "mlflow"])
def test_an_absent_package_is_refused_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve.importlib.util, "find_spec", lambda package: None)
    tree = apply_overrides({}, [*good(make_root(tmp_path)), f"log.report_to={json.dumps([name])}"])
    with pytest.raises(ConfigError, match=f"the package {name} is not installed. Install it: pip install {name}"):
        prepare(tree)
