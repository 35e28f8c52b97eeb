"""Packed files stay for as long as a router uses their layout."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from motet.adapters.format.validation import validate
from motet.adapters.packing.packing import pack
from motet.adapters.store.store import KEPT_S, AdapterStore, Repacked
from motet.tests.rigs.lora_files import LAYOUT, SHAPE, lora_files
from motet.tests.rigs.tensor_twins import identical

BF16 = replace(LAYOUT, dtype="bfloat16")


def test_packed_files_of_unused_layouts_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old application, which may be of a version that keeps nothing, beside a new one that packs otherwise."""
    monkeypatch.setattr(Repacked, "add", lambda *_: None)
    files, store = lora_files(), AdapterStore(tmp_path / "store")
    content = validate(files.config_bytes, files.write(tmp_path), SHAPE)
    store.put(content, [LAYOUT, BF16])
    records, beginning = tmp_path / "store" / "layouts", content.digest[:2]
    folder = tmp_path / "store" / beginning / content.digest
    old, new = (folder / f"{layout.key}.packed" for layout in (LAYOUT, BF16))

    def pass_time(seconds: float) -> None:
        for record in records.iterdir():
            os.utime(record, (record.stat().st_mtime - seconds,) * 2)

    for path in (old, new):
        os.utime(path, (0, 0))
    store.keep_layouts([BF16])
    assert store.sweep_packed(beginning) == 0, "the old one was not seen before: its time begins now"
    pass_time(KEPT_S - 3600)
    store.keep_layouts([BF16])
    assert store.sweep_packed(beginning) == 0
    pass_time(3601)
    assert store.sweep_packed(beginning) == 1
    assert new.exists() and not old.exists()
    assert store.load_content(content.digest).digest == content.digest
    assert identical(store.load_packed(content.digest, LAYOUT), pack(content, LAYOUT)), "it is packed again"
    assert store.sweep_packed(beginning) == 0 and old.exists(), "and has it for as long"
