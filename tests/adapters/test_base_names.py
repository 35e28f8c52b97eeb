"""Which names identify a base, and which differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from motet.adapters.errors import AdapterInvalid
from motet.adapters.format.peft import MAX_BASE_CHARS, named_base
from motet.adapters.names import BaseNames, base_name, names_of_folder


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("mirror/QWEN3-8b/", "qwen3-8b"),
        ("/models/Qwen3-8B", "qwen3-8b"),
        ("C:\\models\\Qwen3-8B", "qwen3-8b"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/" + "0a" * 20, "qwen3-8b"),
        ("models--gpt2", "gpt2"),
        ("/data/models/Qwen--Qwen3-8B", "qwen3-8b"),
    ],
)
def test_names_of_hubs_and_folders_are_of_their_last_part(path: str, name: str) -> None:
    assert base_name(path) == name
    assert BaseNames([path]).mismatch("other/" + name.upper()) is None


@pytest.mark.parametrize(
    "path", ["", " ", ".", "./", "..", "~", "/", "./output", "/tmp/model", "runs/checkpoint-1200", "a" * 40]
)
def test_paths_that_say_nothing_match_all(path: str) -> None:
    assert base_name(path) == ""
    assert BaseNames(["Qwen3-8B"]).mismatch(path) is None
    assert BaseNames([path]).mismatch("Qwen3-8B") is None


def test_another_base_is_named_with_the_served_ones() -> None:
    problem = BaseNames(["Qwen/Qwen3-8B", "prod"]).mismatch("meta-llama/Llama-3.1-8B")
    assert problem is not None
    assert "'meta-llama/Llama-3.1-8B'" in problem
    assert "the base here is prod or qwen3-8b" in problem


def test_configs_name_a_base_or_none() -> None:
    assert named_base(b'{"base_model_name_or_path": "a/b"}') == "a/b"
    assert named_base(b'{"base_model_name_or_path": null}') == named_base(b"{}") == ""
    for name in (7, ["a"], "x" * (MAX_BASE_CHARS + 1)):
        with pytest.raises(AdapterInvalid, match="base_model_name_or_path"):
            named_base(json.dumps({"base_model_name_or_path": name}).encode())


def test_the_served_folder_and_its_config_have_names(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    for config, more in (({}, []), ({"_name_or_path": "Qwen/Q"}, ["Qwen/Q"]), ({"_name_or_path": None}, [])):
        (folder / "config.json").write_text(json.dumps(config))
        assert [*names_of_folder(folder)] == [str(folder), *more]
