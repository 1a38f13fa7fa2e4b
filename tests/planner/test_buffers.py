"""Memory beside the model: communicators, buffers of gradients, what an update makes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.planner.buffers import bucket_bytes, communicator_bytes, update_bytes
from shardwise.planner.layout import Layout, Work
from shardwise.planner.parts import stage_parts
from shardwise.planner.runs import read_run
from shardwise.planner.shape import Experts, Shape, model_costs
from shardwise.spec.cluster import load_cluster
from tests.planner.test_runs import ROW

MIB = 2**20
LLAMA = Shape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000)
PHI = Shape("phi-3.5-moe", 8, 4096, 32, 8, 128, 6400, 32064, experts=Experts(16, 2, 6400))
QWEN = Shape("qwen3-8b", 16, 4096, 32, 8, 128, 12288, 152064)


@pytest.mark.parametrize(
    ("shape", "layout", "stage", "mib"),
    [  # MiB by which the peak of a step exceeds what stays of it, in the baselines of MindSpeed-LLM's tests
        (LLAMA, Layout(pp=8, stages=(4,) * 8), 1, 344.0),
        (LLAMA, Layout(pp=8, stages=(4,) * 8), 7, 500.0),
        (LLAMA, Layout(tp=2, pp=4, stages=(8,) * 4), 2, 172.0),
        (PHI, Layout(pp=8, stages=(1,) * 8), 3, 3200.0),
        (QWEN, Layout(tp=2, pp=4, stages=(4,) * 4), 1, 192.0),
        (QWEN, Layout(tp=2, pp=4, stages=(4,) * 4), 0, 1188.0),
    ],
    ids=str,
)
def test_an_update_makes_a_tensor_of_the_largest_weight(shape: Shape, layout: Layout, stage: int, mib: float) -> None:
    parts = stage_parts(model_costs(shape), layout)[stage]
    work = Work(4096, copies_update=True)
    assert update_bytes(parts, layout, work) / MIB == pytest.approx(mib, abs=0.5)
    assert update_bytes(parts, layout, replace(work, copies_update=False)) == 0
    shared = update_bytes(parts, replace(layout, zero=1, dp=64, shard=64), work)
    assert shared < update_bytes(parts, layout, work)


def test_communicators_are_one_for_each_axis_and_one_for_all() -> None:
    gpus, npus = load_cluster("a100-80gb"), load_cluster("ascend-910b2")
    assert communicator_bytes(Layout(), gpus) == 0
    alone = communicator_bytes(Layout(tp=8), gpus)
    assert alone == communicator_bytes(Layout(dp=8), gpus)
    assert communicator_bytes(Layout(tp=8, dp=4), gpus) == pytest.approx(alone + 2 * alone / 3)  # two leave the node
    assert communicator_bytes(Layout(tp=8, dp=4, pp=2), npus) == 4 * 400e6  # HCCL_BUFFSIZE each way
    columns = Layout(tp=8, dp=np.array([1, 4]), pp=np.array([1, 1]))
    assert communicator_bytes(columns, gpus).tolist() == [alone, communicator_bytes(Layout(tp=8, dp=4), gpus)]


def test_gradients_are_copied_into_a_buffer_to_be_summed() -> None:
    layout = Layout(dp=4)
    parts = stage_parts(model_costs(LLAMA), layout)[0]
    work = Work(2048, bucket_elements=5e8)
    assert bucket_bytes(parts, layout, work) == 4 * 5e8
    assert bucket_bytes(parts, Layout(), work) == 0  # nobody to sum with
    assert bucket_bytes(parts, layout, replace(work, counted="tensors")) == 0  # when activations are gone


def test_a_pipeline_that_turns_round_has_both_ends_on_its_first_rank() -> None:
    row = ROW | {"n_layers": "8", "pp": "2", "tp": "1", "dp": "1", "num_devices": "2", "global_batch_seqs": "8"}
    row |= {"micro_batch": "1", "other_opts": "schedules-method=dualpipev;noop-layers=7"}
    run = read_run(row)
    assert run.layout.stages == (3, 4)
    first, last = stage_parts(run.costs, run.layout)
    assert {"embedding", "head"} <= {part.name for part, _, _ in first}
    assert {part.name for part, _, _ in last} == {"dense"}
