"""The launchers of several machines at one endpoint, as threads of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from torch.distributed import DistNetworkError, HashStore

from shardwise.errors import ConfigError, LaunchError
from shardwise.launch import machines as machines_module
from shardwise.launch import meeting
from shardwise.launch.alive import ANSWER_SECONDS
from shardwise.launch.beacon import _open, beacon
from shardwise.launch.machines import Agreement, CameBackError, Machines, Word
from shardwise.launch.meeting import InterruptedMeetingError, Meeting
from shardwise.launch.place import Nodes
from shardwise.train.context import Restart
from tests.launch.jobs import free_endpoint

AGAIN = Restart(1, 2, 5.0, "rank 1 was killed")


def meet(machines: list[Meeting], refused: threading.Event | None = None) -> list[object]:
    """What each machine's meeting gave or raised; the event says that one has raised."""
    results: list[object] = [None] * len(machines)

    def run(place: int) -> None:
        try:
            results[place] = machines[place].next_rendezvous()
        except Exception as error:
            results[place] = error
            if refused is not None:
                refused.set()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return results


def machine(endpoint: str, rank: int, told: str = "devices = 4", stop: Callable[[], bool] = lambda: False) -> Meeting:
    return Meeting(Nodes(2, rank, endpoint), told, stop)


def test_machines_keep_their_numbers_and_share_a_store() -> None:
    endpoint = free_endpoint()
    second, first = meet([machine(endpoint, 1), machine(endpoint, 0)])
    assert (first.rank, second.rank, first.world_size, second.world_size) == (0, 1, 2, 2)  # type: ignore[attr-defined]
    first.store.set("key", "value")  # type: ignore[attr-defined]
    assert second.store.get("key") == b"value"  # type: ignore[attr-defined]
    where = second.bootstrap_store_info  # type: ignore[attr-defined]
    assert f"{where.master_addr}:{where.master_port}" == endpoint


def test_machines_that_were_told_different_things_part() -> None:
    endpoint = free_endpoint()
    results = meet([machine(endpoint, 0, "devices = 4"), machine(endpoint, 1, "devices = 8")])
    for mine, other, result in zip((4, 8), (8, 4), results, strict=True):
        assert isinstance(result, ConfigError)
        assert f"with devices = {mine}: machine" in str(result)
        assert f"was told devices = {other}" in str(result)


def test_two_machines_with_one_number_are_refused() -> None:
    endpoint = free_endpoint()
    stop = threading.Event()
    waiting = machine(endpoint, 0, stop=stop.is_set)
    other = Meeting(Nodes(3, 1, endpoint), "devices = 4", stop.is_set)
    again = Meeting(Nodes(3, 1, endpoint), "devices = 4", stop.is_set)
    results = meet([waiting, other, again], stop)  # the others would wait for machine 2
    assert sum(isinstance(result, ConfigError) and "node_rank = 1" in str(result) for result in results) == 1


def test_who_comes_back_is_told_from_who_has_anothers_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place of one whose job has failed and who has not said a word of it."""
    monkeypatch.setattr(machines_module, "_BACK_SECONDS", 0.2)
    here, there = Machines(), Machines()
    here.store = there.store = HashStore()
    there.check_back(1)  # nothing has begun
    here.begin(0)
    there.check_back(1)  # all are at work
    here.begin(2)
    here.tell_failure(2)
    with pytest.raises(CameBackError) as came:
        there.check_back(1)
    assert came.value.attempt == 2
    here.store.set("word/2/1", "{}")
    there.check_back(1)  # machine 1 lives, and has said its word


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_ends_the_waiting_and_it_is_said_who_is_missing(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_SILENT_SECONDS", 0.0)
    monkeypatch.setattr(meeting, "_CONNECT_SECONDS", 0.3)
    start = time.monotonic()
    with pytest.raises(InterruptedMeetingError):
        machine(free_endpoint(), rank, stop=lambda: time.monotonic() - start > 1.0).next_rendezvous()
    assert time.monotonic() - start < 60, "not the ten minutes of one who is not stopped"
    assert capsys.readouterr().err.count(f"waiting for machine {1 - rank} at 127.0.0.1") == 1


def test_a_machine_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_LIMIT_SECONDS", 0.5)
    with pytest.raises(LaunchError, match="machine 1 has not come within 0 s"):
        machine(free_endpoint(), 0).next_rendezvous()


def test_a_machine_that_prepares_is_waited_for_as_long_as_it_gets_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_LIMIT_SECONDS", 1.5)
    endpoint = free_endpoint()
    results: list[object] = []
    waiting = threading.Thread(target=lambda: results.extend(meet([machine(endpoint, 1)])))
    with beacon(Nodes(2, 0, endpoint)) as counted:
        waiting.start()
        for rows in range(30):
            counted(rows)
            time.sleep(0.1)
        assert waiting.is_alive()
    first = machine(endpoint, 0).next_rendezvous()
    waiting.join(10)
    assert first.world_size == results[0].world_size == 2  # type: ignore[attr-defined]
    assert "machine 0 prepares its data" in capsys.readouterr().err
    endpoint = free_endpoint()
    with beacon(Nodes(2, 0, endpoint)), pytest.raises(LaunchError, match="machine 0 has not come within 2 s"):
        machine(endpoint, 1).next_rendezvous()  # it is there, and does not get on


def test_one_late_answer_is_not_taken_for_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what turns out to be none: it is tried again."""
    answers: list[int | None] = [None, 7, None, None, None, None, None, None]
    tried: list[int] = []

    def store(*_: object, **__: object) -> str:
        tried.append(len(answers))
        if len(tried) == 1:
            raise DistNetworkError("it closed the connection")
        return "the store"

    monkeypatch.setattr(meeting, "preparing_rows", lambda *_: answers.pop(0))
    monkeypatch.setattr(meeting, "TCPStore", store)
    assert cast(str, machine("127.0.0.1:1", 1)._connect()) == "the store"
    assert tried == [3, 0], "after three silences in a row, each time"


def test_machines_wait_for_each_other_longer_than_for_the_tool_that_lists_devices() -> None:
    assert machines_module._WORD_SECONDS >= ANSWER_SECONDS + 30


def test_a_machine_that_prepares_answers_at_all_of_its_addresses() -> None:
    server = _open(Nodes(2, 0, "192.0.2.1:0"))  # an address that is not of this machine, as behind a gate
    assert server is not None
    with server, socket.create_connection(("127.0.0.1", server.getsockname()[1]), 5):
        server.accept()[0].close()


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"rdzv_endpoint = .* cannot be opened on this machine"):
            machine(endpoint, 0).next_rendezvous()


def _agreed(machines: list[Machines], attempt: int, words: list[Word], own: Restart | None = AGAIN) -> list[Agreement]:
    """What each of two machines with two devices is to do after an attempt with these words; on one device each it
    cannot go on."""
    begun: list[int] = []

    def agree(rank: int) -> Agreement:
        def begin(left: int | None) -> int:
            begun.append(rank)
            if left == 1:
                raise LaunchError("1 device", "is too few", "Add one")
            if left == 0:
                raise RuntimeError("can't start new thread")
            return 2 * (4 if left is None else left)

        return machines[rank].agree(Nodes(2, rank, "h:1"), attempt, own if rank == 0 else None, words[rank], begin)

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(agree, (1, 0)))[::-1]
    assert begun == [0] or not found[0].restart, "machine 0 alone, and before it tells the others"
    return found


def test_machines_begin_again_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_module, "_WORD_SECONDS", 0.3)
    monkeypatch.setattr(machines_module, "_PLAN_SECONDS", 0.0)
    endpoint, machines = free_endpoint(), [Machines(), Machines()]

    def meet_again(attempt: int) -> list[Any]:
        told = "devices = 4"
        return meet([Meeting(Nodes(2, r, endpoint), told, lambda: False, machines[r], attempt) for r in (0, 1)])

    first, _ = meet_again(0)
    first.store.set("key", "of the first attempt")
    assert not machines[1].has_failed(0)
    machines[0].tell_failure(0)
    assert machines[1].has_failed(0)
    assert _agreed(machines, 0, [Word(), Word()]) == [Agreement(AGAIN, 8)] * 2

    again, also = meet_again(1)
    assert not machines[1].has_failed(1)
    assert not also.store.check(["key"]), "each attempt has a store of its own"
    again.store.set("key", "of the second")
    assert also.store.get("key") == b"of the second"
    ports = {each.bootstrap_store_info.master_port for each in (again, also)}
    assert len(ports) == 1
    assert ports != {first.bootstrap_store_info.master_port}

    none_left = Word("none of the 4 devices of this machine is left")
    told = "machine 1: none of the 4 devices of this machine is left"
    assert _agreed(machines, 1, [Word(), none_left]) == [Agreement(refusal=told), Agreement()]
    assert _agreed(machines, 2, [Word("it would only fail again"), Word()]) == [Agreement()] * 2
    assert _agreed(machines, 3, [Word(), Word()], own=None) == [Agreement()] * 2, "restarts are used up"
    assert _agreed(machines, 4, [Word(left=3), Word(left=2)]) == [Agreement(AGAIN, 4)] * 2, "as many on each"
    few = Agreement(refusal="1 device: is too few. Add one")
    assert _agreed(machines, 5, [Word(), Word(left=1)]) == [few, Agreement()]
    broken = Agreement(refusal="can't start new thread")
    assert _agreed(machines, 8, [Word(), Word(left=0)]) == [broken, Agreement()], "the others hear of it"
    alone = machines[0].agree(Nodes(2, 0, "h:1"), 6, AGAIN, Word(), lambda left: 8)
    assert alone == Agreement(refusal="machine 1 does not answer")
    machines[0].store = machines[0].attempt_store = None  # its launcher ends
    del first, again
    assert machines[1].agree(Nodes(2, 1, "h:1"), 7, None, Word(), lambda left: 8) == Agreement()
