"""``communication``: a process's place in its job, under each of MindSpore's names for it."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.mindspore import communication
from shardwise.mindspore.communication import management

PLACE = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
FUNCTIONS = ("get_rank", "get_group_size", "get_local_rank", "get_local_rank_size", "get_process_group_ranks")


def test_a_place_is_known_after_init_only() -> None:
    for name in (*FUNCTIONS, "release"):
        with pytest.raises(ConfigError, match=rf"{name}\(\): the job has not begun. Call communication.init\(\) first"):
            getattr(communication, name)()


def test_a_process_under_any_launcher_knows_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (PLACE | MEETING).items():
        monkeypatch.setenv(name, value)
    communication.init("hccl")
    assert "init(backend_name='hccl') has no effect" in capsys.readouterr().err
    assert [getattr(management, name)() for name in FUNCTIONS] == [5, 8, 1, 4, list(range(8))]
    for world in (communication.GlobalComm.WORLD_COMM_GROUP, communication.NCCL_WORLD_COMM_GROUP):
        assert communication.get_rank(group=world) == 5
    with pytest.raises(ConfigError, match=r"group='mine'.*follow from the plan"):
        communication.get_rank(group="mine")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend_name = 'mpi': must be one of hccl, nccl, mccl"):
        communication.init("mpi")
