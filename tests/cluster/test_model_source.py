from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import DryRunError

from motet.cluster.application.model_source import ModelUnavailable, check_model_folder, resolve_model

Progress = list[tuple[str, int, int]]
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1000)}


@dataclass(frozen=True)
class PlannedFile:
    filename: str
    file_size: int
    commit_hash: str = "c0ffee"


class FakeHub:
    """Stands in for `snapshot_download`: knows one repository, and can lose the network or the end of a file."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.offline = False
        self.truncates: str | None = None

    def snapshot_download(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(options)
        if self.offline:
            raise DryRunError("cannot be accessed") from OSError("Name or service not known")
        if options.get("dry_run"):
            return [PlannedFile(name, len(content)) for name, content in FILES.items()]
        folder = Path(options["local_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in FILES.items():
            (folder / name).write_bytes(content[:-1] if name == self.truncates else content)
        return str(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def ignore_progress(stage: str, done: int, total: int) -> None: ...


def test_a_folder_is_used_where_it_is(tmp_path: Path, hub: FakeHub) -> None:
    folder = write_model(tmp_path / "model")
    assert resolve_model(str(folder), tmp_path / "models", ignore_progress) == folder
    assert hub.calls == []


@pytest.mark.parametrize("lost", FILES)
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tmp_path: Path, lost: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / lost).unlink()
    with pytest.raises(ModelUnavailable, match=f"lacks {lost}: "):
        resolve_model(str(folder), tmp_path / "models", ignore_progress)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_model_folder(folder)  # by the single file, as transformers
    (folder / "model.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match=r"lacks model-00002-of-00002\.safetensors: "):
        check_model_folder(folder)
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"")
    check_model_folder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"weight_map": ["a"]}', "is damaged"),
        ('{"weight_map": {"a": null}}', "is damaged"),
        ('{"weight_map": {"a": {}}}', "is damaged"),
        ('{"weight_map": {}}', "lacks model.safetensors: "),
        ('{"weight_map": {"a": "../b.safetensors"}}', "names a file outside its folder: '../b.safetensors'"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, index: str, message: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelUnavailable, match=re.escape(message)):
        check_model_folder(folder)


@pytest.mark.parametrize("named", ["/no/such/folder", "./nothing", "../nothing", "a/b/c"])
def test_what_can_only_be_a_path_is_not_looked_up_at_the_hub(tmp_path: Path, hub: FakeHub, named: str) -> None:
    with pytest.raises(ModelUnavailable, match="there is no folder"):
        resolve_model(named, tmp_path, ignore_progress)
    assert hub.calls == []


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"), tmp_path, ignore_progress)


def test_a_hub_id_is_downloaded_once(tmp_path: Path, hub: FakeHub) -> None:
    progress: Progress = []
    folder = resolve_model("org/tiny", tmp_path, lambda *step: progress.append(step))
    assert folder == tmp_path / "org--tiny"
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    num_bytes = sum(map(len, FILES.values()))
    assert progress[-1] == ("downloading org/tiny", num_bytes, num_bytes)
    hub.offline = True
    assert resolve_model("org/tiny", tmp_path, ignore_progress) == folder


def test_only_safetensors_are_requested_and_the_planned_revision(tmp_path: Path, hub: FakeHub) -> None:
    resolve_model("org/tiny", tmp_path, ignore_progress)
    for options in hub.calls:
        assert not any(pattern.endswith((".bin", ".pt", ".pth", "*")) for pattern in options["allow_patterns"])
    assert hub.calls[-1]["revision"] == "c0ffee"


def test_a_broken_download_is_not_served_and_goes_on_later(tmp_path: Path, hub: FakeHub) -> None:
    hub.truncates = "model.safetensors"
    with pytest.raises(ModelUnavailable, match=r"incomplete \(model\.safetensors\)"):
        resolve_model("org/tiny", tmp_path, ignore_progress)
    hub.truncates = None
    assert resolve_model("org/tiny", tmp_path, ignore_progress) == tmp_path / "org--tiny"


def test_without_a_network_the_message_says_so(tmp_path: Path, hub: FakeHub) -> None:
    hub.offline = True
    with pytest.raises(ModelUnavailable, match=r"no folder 'org/tiny'.*network.*Name or service not known"):
        resolve_model("org/tiny", tmp_path, ignore_progress)


def test_a_name_that_the_hub_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="not valid"):
        resolve_model("what is this?", tmp_path, ignore_progress)
