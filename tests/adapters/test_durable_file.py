"""What a file system is asked to keep, and when, so that an acknowledged upload survives a crash of the machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from motet.adapters.store.durable_file import replacing_all


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """`fsync` and `replace`, each with what it was called for, in order."""
    made: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        real_fsync(handle)
        made.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))

    def replace(source: Path, target: Path) -> None:
        real_replace(source, target)
        made.append((f"replace {source}", str(target)))

    monkeypatch.setattr("motet.adapters.store.durable_file.os.fsync", fsync)
    monkeypatch.setattr("motet.adapters.store.durable_file.os.replace", replace)
    return made


def test_files_are_on_the_disk_before_they_have_their_names_and_names_before_it_returns(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    temporary, folder = tmp_path / "tmp", tmp_path / "new" / "folder"
    temporary.mkdir()
    with replacing_all(folder, temporary) as files:
        for name in ("tensors", "manifest"):
            with files.write(name) as file:
                file.write(name.encode())
        with files.write("derived", durable=False) as file:
            file.write(b"derived")
        assert not folder.exists()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        name: name for name in ("tensors", "manifest", "derived")
    }
    names = [call for call, _ in calls]
    renames = {target: call for call, target in calls if call.startswith("replace")}
    for name in ("tensors", "manifest"):
        call = renames[str(folder / name)]
        assert names.index(call) > calls.index(("fsync", call.removeprefix("replace ")))
    last_rename = max(names.index(call) for call in renames.values())
    assert {path for call, path in calls[last_rename + 1 :]} == {str(tmp_path), str(folder.parent), str(folder)}
    assert len(calls) == 2 + 3 + 3


@pytest.mark.parametrize("place", ["in the block", "as a file is synced"])
def test_what_fails_leaves_all_as_it_was(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, folder = tmp_path / "tmp", tmp_path / "folder"
    temporary.mkdir()
    folder.mkdir()
    (folder / "tensors").write_text("old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "as a file is synced":
        monkeypatch.setattr("motet.adapters.store.durable_file.os.fsync", full)

    def replace_all() -> None:
        with replacing_all(folder, temporary) as files:
            with files.write("tensors") as file:
                file.write(b"new")
            if place == "in the block":
                full(0)

    with pytest.raises(OSError, match="No space"):
        replace_all()
    assert not [*temporary.iterdir()]
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("tensors", "old")]
