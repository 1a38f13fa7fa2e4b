"""Scripts as jobs: how they start, what they show, how they end, and that their numbers are those of one process."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.spec.tolerance import FP32_LOSS
from tests.fixtures import make_model, make_rows
from tests.launch.jobs import LIMIT_SECONDS, Job, command, free_endpoint
from tests.long import EVERYTHING
from tests.parallel.harness import SGD, Case, reference, strategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
# What every script below begins with; `rows` and `arguments` are what a test changes.
HEAD = f"""
import json, os, sys, time
from pathlib import Path
from shardwise import AutoModel, Trainer, TrainingArguments
print("first line", flush=True)
folder = Path(sys.argv[1])
rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
arguments = dict(output_dir=sys.argv[2], global_batch_size=4, max_steps={STEPS}, optim="sgd",
                 learning_rate={SGD.learning_rate}, lr_scheduler_type="linear", use_cpu=True,
                 train_sampling_strategy="sequential")
model = AutoModel.from_pretrained(folder / "model")
"""
TRAIN = """
trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=rows, eval_dataset=rows,
                  strategy={"pp": 2, "tp": 1, "dp_replicate": 1, "dp_shard": SHARD})
print("second line", flush=True)
result = trainer.train()
evaluated = trainer.evaluate()
trainer.save_metrics("train", result.metrics)
trainer.save_state()
Path(sys.argv[2], f"result-{os.environ['RANK']}").write_text(json.dumps(
    [result.loss.hex(), result.training_loss.hex(), result.global_step, evaluated["eval_loss"].hex()]))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", "llama")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    return folder


def write(folder: Path, text: str, shard: int = 1) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / "script.py"
    path.write_text(HEAD + text.replace("SHARD", str(shard)))
    return path


@contextmanager
def script(inputs: Path, folder: Path, text: str, *before: str, shard: int = 1, **variables: str) -> Iterator[Job]:
    """``python [before] script.py INPUTS OUT``."""
    path = write(folder, text, shard)
    out = folder / "out"
    with command(out, *before, str(path), str(inputs), str(out), **variables) as job:
        yield job


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def results(out: Path, num_ranks: int) -> list[Any]:
    return [json.loads((out / f"result-{rank}").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def expected(inputs: Path) -> list[float]:
    return reference(Case(inputs / "model", strategy(), tuple(make_rows()), global_batch_size=4, steps=STEPS)).losses


def test_a_plain_script_trains_as_one_process_and_every_rank_has_the_loss(
    inputs: Path, tmp_path: Path, expected: list[float]
) -> None:
    with script(inputs, tmp_path, TRAIN) as job:
        assert job.wait() == 0, job.stderr
    assert job.stdout.splitlines() == ["first line", "second line"], "each once, from the first process or rank 0"
    assert losses(job.output_dir) == pytest.approx(expected, rel=FP32_LOSS)
    first, second = results(job.output_dir, 2)
    assert first == second
    assert float.fromhex(first[0]) == losses(job.output_dir)[-1]
    assert float.fromhex(first[1]) == pytest.approx(sum(expected) / STEPS, rel=FP32_LOSS)
    assert first[2] == STEPS
    saved = json.loads((job.output_dir / "train_results.json").read_text())
    assert saved == {"train_loss": float.fromhex(first[1])}
    status = job.status()
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, STEPS)
    for rank in range(2):
        log = (job.output_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert log[:2] == ["first line", "second line"]
    assert (job.output_dir / "export" / "config.json").exists()


def test_a_job_of_torchrun_joins_and_trains_the_same(inputs: Path, tmp_path: Path, expected: list[float]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    with script(inputs, tmp_path, TRAIN, *torchrun, *where) as job:
        assert job.wait() == 0, job.stderr
    assert losses(job.output_dir) == pytest.approx(expected, rel=FP32_LOSS)
    assert len({tuple(result) for result in results(job.output_dir, 2)}) == 1
    assert (job.status()["state"], job.status()["exit_code"]) == ("done", 0)


def test_under_torchrun_a_refusal_of_rank_0_reaches_all(inputs: Path, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with script(inputs, tmp_path, TRAIN, *torchrun, *where) as job:
        assert job.wait() != 0
    assert job.stderr.count("shardwise: output_dir") == 2, "one message a rank, and no rank waits"


def test_two_launchers_are_two_machines_of_one_job(inputs: Path, tmp_path: Path, expected: list[float]) -> None:
    endpoint = free_endpoint()
    path, out = write(tmp_path, TRAIN, shard=2), tmp_path / "out"

    def start(rank: int) -> Any:
        places = ("nnodes=2", f"node_rank={rank}", f"rdzv_endpoint={endpoint}")
        settings = [part for place in places for part in ("--set", place)]
        run = ("-m", "shardwise.cli", "run", "--devices", "4", *settings)
        return command(out, *run, str(path), str(inputs), str(out))

    with start(1) as second, start(0) as first:
        assert first.wait() == 0, first.stderr
        assert second.wait() == 0, second.stderr
    assert losses(out) == pytest.approx(expected, rel=FP32_LOSS)
    assert len({tuple(result) for result in results(out, 4)}) == 1
    assert first.stdout.splitlines() == ["first line", "second line"]
    assert second.stdout.splitlines() == ["first line"], "from its first process; rank 0 is on machine 0"
    assert first.status()["state"] == "done"


def test_a_command_line_over_two_machines_trains_the_same(inputs: Path, tmp_path: Path, expected: list[float]) -> None:
    endpoint = free_endpoint()
    out = tmp_path / "out"
    settings = [f"train.max_steps={STEPS}", "train.optimizer=sgd", f"train.learning_rate={SGD.learning_rate}"]
    settings += ["train.global_batch_size=4", "data.shuffle=false", "pp=2", "tp=1", "dp_replicate=1", "dp_shard=1"]
    run = ("-m", "shardwise.cli", "train", "--model", str(inputs / "model"), "--data", str(inputs / "rows.jsonl"))

    def start(rank: int) -> Any:
        places = ("nnodes=2", f"node_rank={rank}", f"rdzv_endpoint={endpoint}", "device=cpu")
        return command(out, *run, "--output-dir", str(out), *settings, *places)

    with start(0) as first, start(1) as second:
        assert first.wait() == 0, first.stderr
        assert second.wait() == 0, second.stderr
    assert losses(out) == pytest.approx(expected, rel=FP32_LOSS)
    assert first.status()["state"] == "done"
    assert (second.stdout, second.stderr) == ("", "")


def test_evaluation_alone_and_a_second_trainer(inputs: Path, tmp_path: Path, expected: list[float]) -> None:
    """What is evaluated before and after training by Trainers of their own, in one job, which then says it is done."""
    text = """
strategy = {"pp": 1, "tp": 2, "dp_replicate": 1, "dp_shard": 1}
def evaluate(model, name):
    arguments = TrainingArguments(output_dir=f"{sys.argv[2]}-{name}", use_cpu=True)
    return Trainer(model, arguments, eval_dataset=rows, strategy=strategy).evaluate()["eval_loss"]
before = evaluate(folder / "model", "before")
trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=rows, eval_dataset=rows, strategy=strategy)
losses = [trainer.train().loss, before, trainer.evaluate()["eval_loss"]]
trainer.save_model(sys.argv[2] + "-saved")
losses.append(evaluate(sys.argv[2] + "-saved", "after"))
print(json.dumps(losses))
sys.exit(0)
"""
    with script(inputs, tmp_path, text) as job:
        assert job.wait() == 0, job.stderr
    assert (job.status()["state"], job.status()["exit_code"]) == ("done", 0)
    last, before, after, saved = json.loads(job.stdout.splitlines()[-1])
    assert last == pytest.approx(expected[-1], rel=FP32_LOSS)
    assert after == pytest.approx(saved, rel=FP32_LOSS)
    assert after < before
    for name, value, step in (("out-before", before, 0), ("out", after, STEPS), ("out-after", saved, 0)):
        assert (tmp_path / name / "plan.json").is_file()
        line = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert (line["kind"], line["step"], line["eval_loss"]) == ("eval", step, value)


@pytest.mark.parametrize(
    ("end", "code", "state", "words"),
    [
        ("sys.exit(5)", 5, "failed", ["left with status 5"]),
        ("if os.environ['RANK'] == '1': raise ValueError('row 17')\ntime.sleep(99)", 3, "failed", ["rank 1", "row 17"]),
    ],
    ids=["exit 5", "raise"],
)
def test_how_a_script_ends_after_training(
    inputs: Path, tmp_path: Path, end: str, code: int, state: str, words: list[str]
) -> None:
    with script(inputs, tmp_path, f"arguments['max_steps'] = 1\n{TRAIN}\n{end}\n") as job:
        assert job.wait() == code, job.stderr
    assert (job.status()["state"], job.status()["exit_code"]) == (state, code)
    for word in words:
        assert word in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("alone", [0, 1] if EVERYTHING else [1])  # rank 0 alone: the next test
def test_a_rank_that_trains_alone_is_told_at_once_who_did_not(inputs: Path, tmp_path: Path, alone: int) -> None:
    text = TRAIN.replace("result = trainer.train()", f"if os.environ['RANK'] != '{alone}': sys.exit()\ntrainer.train()")
    with script(inputs, tmp_path, text) as job:
        assert job.wait() == 3
    told = f"train() on rank {alone}: rank {1 - alone} came to the end of the script without it. Call it on every rank"
    assert told in job.stderr
    assert "Traceback" not in job.stderr


def test_a_call_after_training_that_only_one_rank_makes_is_told_too(inputs: Path, tmp_path: Path) -> None:
    text = TRAIN.replace("evaluated =", "if not trainer.is_world_process_zero(): sys.exit()\nevaluated =")
    with script(inputs, tmp_path, text) as job:
        assert job.wait() == 3
    assert "evaluate() on rank 0: rank 1 came to the end of the script without it" in job.stderr
    assert (job.status()["state"], job.status()["rank"], job.status()["step"]) == ("failed", 0, STEPS)


CONTACT = """
import shardwise.mindspore as ms
ms.set_auto_parallel_context(device_num=2)
ms.communication.init()
Path(sys.argv[2] + f"-begun-{ms.communication.get_rank()}").write_text(str(os.getpid()))
"""


def test_a_script_that_raises_before_it_trains_is_told_by_rank_and_leaves_its_logs(
    inputs: Path, tmp_path: Path
) -> None:
    with script(inputs, tmp_path, CONTACT + "raise KeyError('no such column')", SHARDWISE_DEVICE="cpu") as job:
        assert job.wait() == 3
    assert "failed: KeyError: 'no such column'" in job.stderr
    assert "Traceback" not in job.stderr
    log = Path(job.stderr.strip().splitlines()[-1].removeprefix("log: "))
    assert "KeyError" in log.read_text()
    assert not job.output_dir.exists()


def test_a_script_without_a_trainer_runs_in_all_processes_and_leaves_nothing(inputs: Path, tmp_path: Path) -> None:
    rest = "print('rank', ms.communication.get_rank(), 'of', ms.communication.get_group_size())"
    with script(inputs, tmp_path, CONTACT + rest, SHARDWISE_DEVICE="cpu", TMPDIR=str(tmp_path)) as job:
        assert job.wait() == 0, job.stderr
    assert job.stdout == "first line\nrank 0 of 2\n"
    assert {path.name for path in tmp_path.glob("out-begun-*")} == {"out-begun-0", "out-begun-1"}
    assert list(tmp_path.glob("shardwise-*")) == []


def _rank_pids(job: Job) -> list[int]:
    paths = [job.output_dir.with_name(f"out-begun-{rank}") for rank in range(2)]
    job.wait_for(lambda: all(path.exists() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def test_a_killed_launcher_takes_its_script_along(inputs: Path, tmp_path: Path) -> None:
    with script(inputs, tmp_path, CONTACT + "time.sleep(300)", SHARDWISE_DEVICE="cpu") as job:
        _rank_pids(job)
        job.process.kill()
        assert job.process.wait(LIMIT_SECONDS) == -signal.SIGKILL


def test_a_signal_before_training_ends_at_once(inputs: Path, tmp_path: Path) -> None:
    with script(inputs, tmp_path, CONTACT + "time.sleep(300)", SHARDWISE_DEVICE="cpu") as job:
        _rank_pids(job)
        job.process.terminate()
        assert job.wait() == 143
    assert job.stderr.splitlines()[-1] == "stopped by SIGTERM"


def test_a_signal_while_it_trains_saves_and_the_rest_of_the_script_does_not_run(inputs: Path, tmp_path: Path) -> None:
    text = "arguments['max_steps'] = 3000\n" + TRAIN + "print('not reached')\n"
    with script(inputs, tmp_path, text) as job:
        metrics = job.output_dir / "metrics.jsonl"
        job.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
        job.process.terminate()
        assert job.wait() == 143, job.stderr
    assert "not reached" not in job.stdout
    status = job.status()
    assert (status["state"], status["exit_code"]) == ("stopped", 143)
    assert (job.output_dir / status["checkpoint"]).is_dir()
    resumed = f"arguments['max_steps'] = {status['step'] + 2}\n" + TRAIN.replace(
        "trainer.train()", "trainer.train(resume_from_checkpoint=True)"
    )
    with script(inputs, tmp_path, resumed) as job:
        assert job.wait() == 0, job.stderr
    assert len(losses(job.output_dir)) == status["step"] + 2


def test_a_wrong_number_of_devices_and_a_wrong_trainer_are_refused_before_a_job_starts(
    inputs: Path, tmp_path: Path
) -> None:
    run = ("-m", "shardwise.cli", "run", "--devices", "4", "--device", "cpu")
    with script(inputs, tmp_path, CONTACT, *run) as job:
        assert job.wait() == 2
    assert job.stderr == (
        "shardwise: device_num = 2 and --devices = 4: must be equal: the script counts on this number of processes. "
        "Use 2 for both\n"
    )
    with script(inputs, tmp_path, TRAIN.replace('"tp": 1', '"tp": 3')) as job:
        assert job.wait() == 2
    assert job.stderr.startswith("shardwise: strategy.tp = 3: does not divide the 4 attention heads")
    assert "second line" not in job.stdout


def test_a_machine_that_waits_for_another_can_be_stopped(inputs: Path, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    settings = [part for key in ("nnodes=2", f"rdzv_endpoint={endpoint}") for part in ("--set", key)]
    run = ("-m", "shardwise.cli", "run", "--devices", "4", *settings)
    with script(inputs, tmp_path, TRAIN, *run, shard=2) as job:
        job.wait_for(lambda: socket_is_open(endpoint))
        job.process.terminate()
        assert job.wait() == 143
    assert job.stderr.splitlines()[-1] == "stopped by SIGTERM"


def socket_is_open(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


# Where it repays, blocks compile as in tests/train/test_run.py: that takes long, and more shows of it there.
@pytest.mark.parametrize(("saved_share", "compiled"), [(0.1, False), (1e9, True)] if EVERYTHING else [(0.1, False)])
def test_graph_mode_compiles_where_the_rule_says_so(
    inputs: Path, tmp_path: Path, expected: list[float], saved_share: float, compiled: bool
) -> None:
    text = f"""
import shardwise.mindspore as ms
from shardwise.spec import compiling
compiling.SAVED_SHARE = {saved_share}
ms.set_context(mode=ms.GRAPH_MODE)
"""
    with script(inputs, tmp_path, text + TRAIN) as job:
        assert job.wait(500) == 0, job.stderr
    assert losses(job.output_dir) == pytest.approx(expected, rel=FP32_LOSS)
    (line,) = [line for line in job.stderr.splitlines() if line.startswith("compile ")]
    assert ("blocks are compiled" in line) == compiled
    assert f"compile: {str(compiled).lower()}\n" in (job.output_dir / "run.yaml").read_text()
    times = [json.loads(line).get("compile_seconds") for line in (job.output_dir / "metrics.jsonl").open()]
    assert any(times) == compiled


def test_a_split_by_methods_and_callbacks_of_mindspore_train_as_one_process(
    inputs: Path, tmp_path: Path, expected: list[float]
) -> None:
    text = """
import shardwise.mindspore as ms
from shardwise.mindspore.train.callback import CheckpointConfig, LossMonitor, ModelCheckpoint
model = ms.parallel.AutoParallel(model)
model.pipeline(stages=2, scheduler="gpipe")
callbacks = [LossMonitor(2), ModelCheckpoint(config=CheckpointConfig(save_checkpoint_steps=2))]
"""
    train = TRAIN.replace('"pp": 2, ', "").replace("strategy=", "callbacks=callbacks, strategy=")
    with script(inputs, tmp_path, text + train) as job:
        assert job.wait() == 0, job.stderr
    assert losses(job.output_dir) == pytest.approx(expected, rel=FP32_LOSS)
    settings = yaml.safe_load((job.output_dir / "run.yaml").read_text())
    assert (settings["strategy"]["schedule"], settings["log"]["steps"]) == ("gpipe", 2)
    checkpoints = sorted(path.name for path in (job.output_dir / "checkpoints").glob("step-*"))
    assert checkpoints == ["step-00000002", "step-00000004"]


# One rank dies at the end of its third step, in the first attempt alone.
DIES = """
from shardwise import Callback
class Dies(Callback):
    may_stop = False
    def on_step_end(self, step, metrics):
        if step == 3 and os.environ["RANK"] == "RANK_THAT_DIES" and not Path(sys.argv[2] + "-died").exists():
            Path(sys.argv[2] + "-died").touch()
            os.kill(os.getpid(), 9)
arguments |= dict(save_steps=1, restarts=1)
"""


def dying(rank: int) -> str:
    train = TRAIN.replace("strategy=", "callbacks=[Dies()], strategy=")
    return DIES.replace("RANK_THAT_DIES", str(rank)) + train


def test_a_script_goes_on_after_a_failure(inputs: Path, tmp_path: Path, expected: list[float]) -> None:
    """It begins from its first line, and its Trainer from the newest checkpoint; a Trainer before it begins anew."""
    first = "Trainer(model, TrainingArguments(**arguments | dict(output_dir=sys.argv[2] + '-first', max_steps=1)),"
    first += " train_dataset=rows, strategy=dict(pp=2)).train()\n"
    text = dying(1).replace("\ntrainer =", f"\n{first}trainer =")
    with script(inputs, tmp_path, text) as job:
        assert job.wait() == 0, job.stderr
    assert losses(job.output_dir) == pytest.approx(expected, rel=FP32_LOSS)
    assert "rank 1 was killed by SIGKILL" in job.stderr
    assert "; restart 1 of 1\n" in job.stderr
    assert "resuming from " in job.stderr
    assert "restart 1 of 1: step 3 is made, " in job.stderr
    status = job.status()
    assert (status["state"], status["step"], status["first_step"], status["restarts"]) == ("done", STEPS, 2, 1)
    log = (tmp_path / "out-first" / "logs" / "rank-1.log").read_text()
    assert log.count("first line") == 1, "the second attempt writes where the first has failed, until it knows better"


def test_a_trainer_that_a_callback_had_ended_ends_there_again(inputs: Path, tmp_path: Path) -> None:
    """Though the callback would not end it again, and without a checkpoint of its end."""
    ends = """
class EndsOnce(Callback):
    def on_step_end(self, step, metrics):
        if step == 2 and not Path(sys.argv[2] + "-died").exists():
            self.stop("two are enough")
"""
    first = "first = Trainer(model, TrainingArguments(**arguments | dict(output_dir=sys.argv[2] + '-first',"
    first += " save_strategy='no')), train_dataset=rows, callbacks=[EndsOnce()], strategy=dict(pp=2))\nfirst.train()\n"
    text = dying(1).replace("\ntrainer =", f"\n{ends}\n{first}trainer =")
    with script(inputs, tmp_path, text) as job:
        assert job.wait() == 0, job.stderr
    assert "; restart 1 of 1\n" in job.stderr
    assert job.stderr.count("ended: two are enough") == 2
    assert len(losses(tmp_path / "out-first")) == 2
    assert len(losses(job.output_dir)) == STEPS


def test_a_job_of_two_machines_goes_on_after_a_failure_and_a_second_one_is_named_by_both(
    inputs: Path, tmp_path: Path, expected: list[float]
) -> None:
    endpoint = free_endpoint()
    ends = "os.kill(os.getpid(), 9) if os.environ['RANK'] == '3' else time.sleep(60)\n"
    path, out = write(tmp_path, dying(3) + ends, shard=2), tmp_path / "out"

    def start(rank: int) -> Any:
        places = ("nnodes=2", f"node_rank={rank}", f"rdzv_endpoint={endpoint}")
        settings = [part for place in places for part in ("--set", place)]
        run = ("-m", "shardwise.cli", "run", "--devices", "4", *settings)
        return command(out, *run, str(path), str(inputs), str(out))

    with start(1) as second, start(0) as first:
        assert first.wait() == 3, first.stderr
        assert second.wait() == 3, second.stderr
    for job in (first, second):
        assert job.stderr.count("rank 3 was killed by SIGKILL") == 2
        assert job.stderr.count("; restart 1 of 1") == 1
    assert losses(out) == pytest.approx(expected, rel=FP32_LOSS)
    assert len({tuple(result) for result in results(out, 4)}) == 1
    assert (first.status()["first_step"], first.status()["restarts"]) == (2, 1)
    assert (first.status()["state"], first.status()["rank"]) == ("failed", 3)
