"""How the ranks of a script meet before they work together, and who is named when they do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from shardwise.errors import LaunchError
from shardwise.launch import join
from shardwise.launch.join import JobStore
from shardwise.launch.place import Place

NUM_RANKS = 3


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[JobStore]:
    """Each rank's end of one store."""
    shared = HashStore()

    def rendezvous(*_: Any, **__: Any) -> Iterator[Any]:
        yield shared, 0, NUM_RANKS

    monkeypatch.setattr(join, "rendezvous", rendezvous)
    return [JobStore(Place(rank, rank, NUM_RANKS, True), timedelta(seconds=60)) for rank in range(NUM_RANKS)]


def _in_a_hurry(stores: list[JobStore]) -> None:
    for store in stores:
        store._timeout = timedelta(seconds=0.3)


def _meet(stores: list[JobStore], *calls: str) -> list[str]:
    """What each rank that makes a call is told; empty where all came together."""

    def one(store: JobStore, call: str) -> str:
        try:
            store.meet(call)
        except LaunchError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, stores, calls))


def test_ranks_that_all_come_go_on_time_after_time(stores: list[JobStore]) -> None:
    for call in ("train()", "evaluate()", "evaluate()"):
        assert _meet(stores, call, call, call) == ["", "", ""]


def test_those_that_do_not_come_in_time_are_named(stores: list[JobStore]) -> None:
    _in_a_hurry(stores)
    told = _meet(stores, "train()")
    assert told == [
        "train() on rank 0: rank 1, 2 did not come within 0 s. Call it on every rank: each holds a part of the model"
    ]


def test_one_that_has_ended_its_script_is_not_waited_for(stores: list[JobStore]) -> None:
    assert _meet(stores, "train()", "train()", "train()") == ["", "", ""]
    stores[1].leave()
    for message, rank in zip(_meet([stores[0], stores[2]], "evaluate()", "evaluate()"), (0, 2), strict=True):
        assert message.startswith(f"evaluate() on rank {rank}: rank 1 came to the end of the script without it")


def test_one_that_has_come_and_then_left_is_no_reason(stores: list[JobStore]) -> None:
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(stores[1].meet, "train()")
        while not stores[1]._store.check(["meeting/0/1"]):  # it has come
            time.sleep(0.001)
        stores[1].leave()
        assert _meet([stores[0], stores[2]], "train()", "train()") == ["", ""]
        early.result()


def test_two_different_calls_are_refused(stores: list[JobStore]) -> None:
    _in_a_hurry(stores)
    _meet(stores, "train()")
    (told,) = _meet([stores[1]], "save_model()")
    assert told == "save_model() on rank 1: another rank calls train(). Call the same on every rank"


def test_a_long_wait_is_told(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _in_a_hurry(stores)
    monkeypatch.setattr(join, "_SILENT_SECONDS", 0.0)
    _meet(stores, "train()")
    assert capsys.readouterr().err == "train(): waiting for rank 1, 2\n"


def test_many_ranks_are_counted() -> None:
    assert join._ranks(list(range(1, 11))) == "rank 1, 2, 3, 4, 5, 6, 7, 8 and 2 others"
