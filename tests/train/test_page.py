"""``report.html``: what the files of a run hold stands on the page, and the page needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.strategy import Strategy
from shardwise.train.callbacks import RunInfo
from shardwise.train.page import RunPage
from tests.spec.model_folder import make_spec

VOID = {"meta", "line", "rect", "polyline", "circle"}


class _Page(HTMLParser):
    """Text and attributes of a page; every element must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.attributes, self.tags, self._open = "", [], [], []  # type: ignore[var-annotated]
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + "\n"

    def curves(self) -> list[list[tuple[float, float]]]:
        shapes = [value for name, value in self.attributes if name == "points"]
        return [[tuple(map(float, point.split(","))) for point in shape.split()] for shape in shapes]  # type: ignore[misc]


def _step(step: int, **changes: Any) -> dict[str, Any]:
    values = {"loss": 4.0 / step, "grad_norm": 1.0, "lr": 1e-3, "num_tokens": 7, "num_input_tokens": 10, "num_rows": 2}
    times = {"step_seconds": 0.5, "tokens_per_second": 20.0, "mfu": None, "peak_memory_bytes": 2**20}
    return {"kind": "train", "step": step, "epoch": 0} | values | times | changes


def _eval(step: int, loss: float | None) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "epoch": 0, "eval_loss": loss, "eval_tokens": 9}


@pytest.fixture
def callback(tmp_path: Path) -> RunPage:
    spec = make_spec(tmp_path / "model")
    Plan(spec, Strategy(stages=(spec.num_blocks,)), 8, "cpu").save(tmp_path / "plan.json")
    run = parse_run({"model": "models/a<b>&c", "data": {"train": "rows.jsonl"}})
    made = RunPage()
    made.on_train_begin(RunInfo(run, tmp_path, rank=0, world_size=1, first_step=0, total_steps=9, model=None))
    return made


def _end(callback: RunPage, folder: Path, lines: list[dict[str, Any]], reason: str | None = None) -> _Page:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    callback.on_train_end(reason)
    return _Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_tells_what_the_files_hold_and_loads_nothing(callback: RunPage, tmp_path: Path) -> None:
    lines = [_step(1), _step(2), _eval(2, 2.5), _step(3, loss=None, grad_norm=None, skipped="not <finite>"), _step(4)]
    page = _end(callback, tmp_path, [*lines, _eval(4, 1.25)])
    for words in ("models/a<b>&c", "4 of 9", "40 read, 28 learned", "00:02 in steps; 0.5 s", "1.00 MiB", "1.25 (best)"):
        assert words in page.words
    for words in ("step 3: not <finite>", "learning_rate: 5.0e-05", "global batch 8 rows"):
        assert words in page.words
    assert "2.5 (best)" not in page.words
    assert "MFU" not in page.words
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    loss, evaluation, *_ = page.curves()
    assert [len(loss), len(evaluation)] == [3, 2]
    heights = [y for _, y in loss]
    assert heights == sorted(heights), "a loss that falls goes down on the page"


def test_a_long_run_is_drawn_with_its_means(callback: RunPage, tmp_path: Path) -> None:
    page = _end(callback, tmp_path, [_step(step, loss=float(step % 2), mfu=0.4) for step in range(1, 4001)])
    loss = page.curves()[0]
    assert len(loss) == 800
    assert len({y for _, y in loss}) == 2, "five steps a point: their mean is 0.4 or 0.6"
    assert "40.0% (median)" in page.words


@pytest.mark.parametrize("lines", [[], [_eval(0, None)], [_step(1)], [_step(1, loss=None), _eval(1, 3.0)]])
def test_a_page_of_next_to_nothing_is_whole(callback: RunPage, tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    page = _end(callback, tmp_path, lines, "stopped by SIGTERM")
    assert "ended early: stopped by SIGTERM" in page.words
    assert "nan" not in re.sub(r"on_nan|finite", "", page.words)


def test_a_failure_after_a_step_is_told_and_one_before_leaves_the_folder(callback: RunPage, tmp_path: Path) -> None:
    callback.on_exception(ValueError("too <soon>"))
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "metrics.jsonl").write_text(json.dumps(_step(1)) + "\n")
    callback.on_step_end(1, _step(1))
    callback.on_exception(ValueError("lost <it>"))
    assert "failed: lost <it>" in _Page((tmp_path / "report.html").read_text()).words


def test_an_evaluation_after_the_end_is_added(callback: RunPage, tmp_path: Path) -> None:
    callback.on_evaluate(_eval(1, 3.0))
    assert not (tmp_path / "report.html").exists()
    assert "Evaluations" not in _end(callback, tmp_path, [_step(1)]).words
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(_eval(1, 3.0)) + "\n")
    callback.on_evaluate(_eval(1, 3.0))
    assert "3 (best)" in _Page((tmp_path / "report.html").read_text()).words
