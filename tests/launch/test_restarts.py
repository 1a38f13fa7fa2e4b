"""Restarts after a failure: what is tried again, how often, and on which devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from shardwise.config import apply_overrides, dump_yaml, load_yaml
from shardwise.errors import LaunchError
from shardwise.front import resolve
from shardwise.front.fewer import on_fewer_devices
from shardwise.front.resolve import prepare
from shardwise.launch import restarts
from shardwise.launch.agent import Outcome, Work
from shardwise.launch.alive import Alive
from shardwise.launch.lock import release_all
from shardwise.launch.machines import Machines
from shardwise.launch.output import write_run
from shardwise.launch.place import Nodes
from shardwise.launch.script import Script, outputs_of, point_to
from shardwise.spec.plan import Plan
from shardwise.train.context import Restart
from tests.checkpoint.fakes import fake_checkpoint
from tests.spec.model_folder import make_folder

FAILED = Outcome({"state": "failed", "exit_code": 3, "error": "rank 1 was killed"}, "rank 1 was killed", True, 5.0)
REFUSED = Outcome({"state": "refused", "exit_code": 2, "error": "no such row"}, "no such row")
DONE = Outcome({"state": "done", "exit_code": 0})


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    """A run on four ranks that may be started again twice."""
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    paths = [f"model={make_folder(tmp_path / 'model')}", f"data.train={tmp_path / 'rows.jsonl'}"]
    given = [f"output_dir={tmp_path / 'out'}", "device=cpu", "devices=4", "pp=1", "restarts=2"]
    run, plan = prepare(apply_overrides({}, [*paths, *given]))
    output = write_run(run, plan)
    (output / "logs").mkdir()
    yield Work(output, "a:b", plan.devices, replan=on_fewer_devices)
    release_all()


def _attempts(outcomes: list[Outcome], work: Work) -> tuple[Outcome, list[tuple[int, Restart | None]]]:
    seen: list[tuple[int, Restart | None]] = []

    def attempt(work: Work, restart: Restart | None) -> Outcome:
        seen.append((work.devices, restart))
        return outcomes[len(seen) - 1]

    return restarts.run_with_restarts(work, attempt, lambda: False), seen


def test_a_failure_is_tried_again_and_told_of(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    (work.folder / "logs" / "error-rank-1.json").write_text("{}")
    outcome, seen = _attempts([FAILED, FAILED, DONE], work)
    assert outcome is DONE
    told = [Restart(number, 2, 5.0, "rank 1 was killed") for number in (1, 2)]
    assert seen == [(4, None), (4, told[0]), (4, told[1])]
    assert "rank 1 was killed; restart 1 of 2" in capsys.readouterr().err
    assert not list(work.folder.glob("logs/error-*"))


def test_restarts_are_used_up(work: Work) -> None:
    outcome, seen = _attempts([FAILED] * 3, work)
    assert (outcome, len(seen)) == (FAILED, 3)


def test_what_would_fail_again_is_not_tried_again(work: Work) -> None:
    assert _attempts([REFUSED], work)[0] is REFUSED
    assert restarts.run_with_restarts(work, lambda work, restart: FAILED, lambda: True) is FAILED


@pytest.mark.parametrize(("left", "used"), [(2, 2), (3, 2), (1, 1)])
def test_a_run_is_planned_anew_for_the_devices_that_are_left(
    work: Work, monkeypatch: pytest.MonkeyPatch, left: int, used: int
) -> None:
    """Three do not divide the batch of eight rows, which stays."""
    living = Alive("cuda", tuple(map(str, range(left))))
    monkeypatch.setattr(restarts, "living_devices", lambda work: living)
    outcome, seen = _attempts([FAILED, DONE], work)
    assert outcome is DONE
    assert [devices for devices, _ in seen] == [4, used]
    plan = Plan.load(work.folder / "plan.json")
    assert (plan.devices, plan.strategy.dp, plan.global_batch_size) == (used, used, 8)


def test_a_strategy_that_does_not_fit_what_is_left_ends_the_job(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    path = work.folder / "run.yaml"
    tree = load_yaml(path)
    path.write_text(dump_yaml(tree | {"filled": [key for key in tree["filled"] if key != "strategy.dp_shard"]}))
    monkeypatch.setattr(restarts, "living_devices", lambda work: Alive("cuda", ("0", "1")))
    outcome, seen = _attempts([FAILED, DONE], work)
    assert len(seen) == 1
    assert outcome.message is not None
    assert outcome.message.startswith("rank 1 was killed\nno restart: ")
    assert "devices = 2" in outcome.message


@pytest.mark.parametrize(("saved", "resume"), [(None, None), (5, None), (1001, "auto")])
def test_a_run_that_is_planned_anew_before_its_first_save_keeps_what_it_began_from(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int | None, resume: str | None
) -> None:
    """With ``auto`` it would find nothing, and begin at step 0 from the model's own weights."""
    named = str(fake_checkpoint(tmp_path / "other", 1000, {"train": {}, "identity": {}}))
    path = work.folder / "run.yaml"
    path.write_text(dump_yaml(load_yaml(path) | {"resume": named}))
    (work.folder / "metrics.jsonl").write_text("")
    if saved is not None:
        fake_checkpoint(work.folder / "checkpoints", saved, {"train": {}, "identity": {}})
    monkeypatch.setattr(restarts, "living_devices", lambda work: Alive("cuda", ("0", "1")))
    monkeypatch.setattr(resolve, "check_resume", lambda *arguments: None)
    assert _attempts([FAILED, DONE], work)[0] is DONE
    assert load_yaml(path)["resume"] == (resume or named)


def test_what_is_left_is_what_the_workers_see(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough are left, but the first one, which the first worker would take, is lost."""
    alive = Alive("cuda", ("1", "2", "3", "4"), lost=("0",))
    monkeypatch.setattr(restarts, "living_devices", lambda work: alive)
    going_on = restarts.with_devices_left(work)
    assert (going_on.devices, going_on.variables) == (4, {"CUDA_VISIBLE_DEVICES": "1,2,3,4"})
    going_on = restarts.with_devices_left(replace(work, devices=8, nodes=Nodes(2, 1, "h:1")))
    assert (going_on.devices, going_on.variables) == (8, {"CUDA_VISIBLE_DEVICES": "1,2,3,4"})


def test_several_machines_do_not_begin_a_run_without_a_step_on_fewer_devices(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could only begin on as many as before, and one machine would have more processes than devices."""
    monkeypatch.setattr(restarts, "is_set_aside", lambda _: True)
    with pytest.raises(LaunchError, match=r"2 of 4 devices are left.*has made no step"):
        restarts.planned_for(replace(work, nodes=Nodes(2, 0, "h:1")), 2)
    assert restarts.planned_for(work, 2) is work


@pytest.mark.parametrize(("left", "used"), [((2, 1), 2), ((1, 2), 2), ((2, 2), 4), ((0, 2), 0)])
def test_several_machines_go_on_with_as_many_devices_each(
    work: Work, monkeypatch: pytest.MonkeyPatch, left: tuple[int, int], used: int
) -> None:
    """The launcher of machine 0 plans anew; each uses what answers on its own machine."""
    path, store = work.folder / "run.yaml", HashStore()
    path.write_text(dump_yaml(load_yaml(path) | {"nnodes": 2, "rdzv_endpoint": "h:1"}))
    living = [Alive("cuda", ("0", "1")[2 - number :], lost=("0", "1")[: 2 - number]) for number in left]
    monkeypatch.setattr(restarts, "living_devices", lambda work: living[work.nodes.rank])

    def launcher(rank: int) -> tuple[Outcome, list[tuple[int, Mapping[str, str]]]]:
        here = replace(work, nodes=Nodes(2, rank, "h:1"), machines=Machines())
        here.machines.store = store
        seen: list[tuple[int, Mapping[str, str]]] = []

        def attempt(work: Work, restart: Restart | None) -> Outcome:
            seen.append((work.devices, work.variables))
            return DONE if restart else FAILED

        return restarts.run_with_restarts(here, attempt, lambda: False), seen

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(launcher, (0, 1)))
    assert [[devices for devices, _ in seen] for _, seen in found] == [[4, used] if used else [4]] * 2
    if not used:
        rule = "rank 1 was killed\nno restart: none of the 2 devices of this machine is left"
        assert [outcome.message for outcome, _ in found] == [rule, FAILED.message]
        return
    for alive, (outcome, seen) in zip(living, found, strict=True):
        assert outcome is DONE
        assert seen[1][1] == (alive.variables() if alive.lost else {})
    assert Plan.load(work.folder / "plan.json").devices == used


@pytest.mark.parametrize(("left", "rule"), [(("0", "1"), "started again on as many as before"), ((), "none can go on")])
def test_a_script_goes_on_with_all_its_devices_or_not_at_all(
    work: Work, monkeypatch: pytest.MonkeyPatch, left: tuple[str, ...], rule: str
) -> None:
    monkeypatch.setattr(restarts, "living_devices", lambda work: Alive("cuda", left))
    point_to(work.start, work.start)
    outcome, seen = _attempts([FAILED, DONE], replace(work, target=Script("train.py"), replan=None))
    assert len(seen) == 1
    assert f"no restart: {len(left)} of 4 devices are left: " in str(outcome.message)
    assert rule in str(outcome.message)


def test_a_script_may_fail_before_it_says_how_often(tmp_path: Path) -> None:
    """What the command line has preset counts until there is an output folder, and that folder's run.yaml then."""
    (tmp_path / "logs").mkdir()
    work = Work(tmp_path, Script("train.py"), 2, restarts=1)
    outcome, seen = _attempts([FAILED, FAILED], work)
    assert (outcome, len(seen)) == (FAILED, 2)
    assert restarts.allowed_restarts(Work(tmp_path, Script("train.py"), 2)) == 0
    for name, number in (("a", 3), ("b", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.yaml").write_text(f"restarts: {number}\n")
        point_to(tmp_path, tmp_path / name)
        assert restarts.allowed_restarts(work) == number
    assert [path.name for path in outputs_of(tmp_path)] == ["a", "b"]
    point_to(tmp_path, tmp_path / "a")
    assert work.folder == tmp_path / "a"
