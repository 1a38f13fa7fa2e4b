"""A model by name: a path, a folder of models, then a hub, here a small one on this machine."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from shardwise.data.readers import files_of, read_records
from shardwise.errors import ConfigError
from shardwise.front.hub import locate_model, locate_rows
from tests.spec.model_folder import make_folder

COMMIT = "0" * 40


def _entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serves the model ``somebody/tiny``; the list holds the paths that were asked for."""
    import huggingface_hub.constants as constants

    make_folder(tmp_path / "served")
    (tmp_path / "served" / "pytorch_model.bin").write_bytes(b"pickled")
    files = {path.name: path.read_bytes() for path in (tmp_path / "served").iterdir()}
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, body: bool) -> None:
            asked.append(self.path)
            name = self.path.partition("?")[0].rpartition("/")[2]
            if self.path.startswith("/api/models/somebody/tiny/tree/"):
                content = json.dumps([_entry(name, data) for name, data in files.items()]).encode()
            elif self.path.startswith("/api/models/somebody/tiny"):
                siblings = [{"rfilename": name} for name in files]
                content = json.dumps({"id": "somebody/tiny", "sha": COMMIT, "siblings": siblings}).encode()
            elif self.path.startswith("/somebody/tiny/resolve/") and name in files:
                content = files[name]
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    # The library reads its variables when it is imported.
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for variable in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    yield asked
    server.shutdown()
    server.server_close()


def test_a_folder_comes_before_the_hub(hub: list[str], tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "models" / "tiny")
    assert locate_model("somebody/tiny", tmp_path / "models") == folder
    assert locate_model(str(folder), None) == folder
    assert hub == []


def test_what_no_folder_has_is_fetched_without_pickled_weights(hub: list[str], tmp_path: Path) -> None:
    folder = locate_model("somebody/tiny", tmp_path / "nowhere")
    assert folder.is_relative_to(tmp_path / "cache")
    names = {path.name for path in folder.iterdir()}
    assert "config.json" in names
    assert any(name.endswith(".safetensors") for name in names)
    assert "pytorch_model.bin" not in names
    assert not any("pytorch_model.bin" in path for path in hub)


def test_the_weights_can_be_left_there(hub: list[str], tmp_path: Path) -> None:
    folder = locate_model("somebody/tiny", None, only_config=True)
    assert {path.suffix for path in folder.iterdir()} == {".json"}


def test_what_nobody_has_is_refused_in_one_message(hub: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        locate_model("somebody/other", tmp_path / "models")
    message = str(error.value)
    assert "\n" not in message
    for word in ("model = 'somebody/other'", str(tmp_path / "models"), "hub", "RepositoryNotFound"):
        assert word in message


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "a/b/c", "~/model"])
def test_a_path_is_not_asked_of_the_hub(hub: list[str], name: str) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        locate_model(name, None)
    assert hub == []


class Fetched:
    """A table of the library datasets, as far as it is used."""

    def __init__(self, content: str) -> None:
        self._fingerprint, self._content = content, content

    def save_to_disk(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "part.jsonl").write_text(json.dumps({"text": self._content}) + "\n")


def test_a_data_set_of_a_hub_is_fetched_once_for_each_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    library = ModuleType("datasets")
    library.__spec__ = ModuleSpec("datasets", None)

    def load_dataset(name: str, config: str | None, split: str) -> Fetched:
        asked.append((name, split) if config is None else (name, config, split))
        if split == "nowhere":
            raise ValueError('Unknown split "nowhere"')
        return Fetched(f"{name} {split}")

    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.chdir(tmp_path)
    first, again, other = (
        locate_rows("data.train", name, None, tmp_path / "cache")
        for name in ("somebody/rows", "somebody/rows:train", "somebody/rows:test")
    )
    assert first == again != other
    os.utime(first, (1.0, 1.0))
    assert locate_rows("data.train", "somebody/rows", None, tmp_path / "cache") == first
    assert os.stat(first).st_mtime > 1.0  # it was used now, and is not to be removed as old
    asked.pop()
    assert asked == [("somebody/rows", "train"), ("somebody/rows", "train"), ("somebody/rows", "test")]
    assert [record.value for record in read_records(files_of(Path(other))[0])] == [{"text": "somebody/rows test"}]
    assert len(list((tmp_path / "cache" / "hub").iterdir())) == 2
    locate_rows("data.train", "somebody/rows:main:train[:100]", None, tmp_path / "cache")
    assert asked[-1] == ("somebody/rows", "main", "train[:100]")
    with pytest.raises(ConfigError, match=r"data.train = 'somebody/rows:nowhere'.*Unknown split.*HF_ENDPOINT"):
        locate_rows("data.train", "somebody/rows:nowhere", None, tmp_path / "cache")


def test_a_data_set_lies_in_a_folder_of_models_or_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "data/rows.jsonl", "a/b/c", "/a/b"):  # names of files
        assert locate_rows("data.train", name, None, None) == name
    with pytest.raises(ConfigError, match=r"data.eval = 'somebody/rows'.*pip install datasets"):
        locate_rows("data.eval", "somebody/rows", None, None)
    held = tmp_path / "models" / "rows"
    held.mkdir(parents=True)
    (held / "test.jsonl").write_text("{}")
    assert locate_rows("data.eval", "somebody/rows:test", tmp_path / "models", None) == str(held / "test.jsonl")
    with pytest.raises(ConfigError, match=r"neither a folder nor a file train \(it holds test.jsonl\)"):
        locate_rows("data.train", "somebody/rows", tmp_path / "models", None)
    for name in ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "main/test.jsonl.zst"):
        (held / name).parent.mkdir(exist_ok=True)
        (held / name).write_text("{}")
    (held / "data" / "train-notes.parquet").write_text("{}")
    whole = locate_rows("data.train", "somebody/rows", tmp_path / "models", None)
    assert [path.name for path in files_of(Path(whole))] == [f"train-0000{n}-of-00002.parquet" for n in range(2)]
    (held / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(ConfigError, match=r"split train: is cut into 2 files by their names, and .* holds 1"):
        locate_rows("data.train", "somebody/rows", tmp_path / "models", None)
    with pytest.raises(ConfigError, match=r"a part of a split.*Leave \[:10\] out"):
        locate_rows("data.train", "somebody/rows:train[:10]", tmp_path / "models", None)
    place = locate_rows("data.train", "somebody/rows:main:test", tmp_path / "models", None)
    assert place == str(held / "main" / "test.jsonl.zst")
    model = make_folder(tmp_path / "models" / "twin")  # with the last part of a data set's name
    with pytest.raises(ConfigError, match="pip install datasets"):
        locate_rows("data.train", "somebody/twin", tmp_path / "models", None)
    held = tmp_path / "models" / "somebody" / "twin"
    held.mkdir(parents=True)
    (model / "train.jsonl").write_text("{}")
    assert locate_rows("data.train", "somebody/twin", tmp_path / "models", None) == str(model / "train.jsonl")
    (held / "train.jsonl").write_text("{}")
    assert locate_rows("data.train", "somebody/twin", tmp_path / "models", None) == str(held / "train.jsonl")
