from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.cluster.application.registration import identify_base

DEMO_BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_BASE, tmp_path / "base"))


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_same_files_are_the_same_base_wherever_they_lie(folder: Path) -> None:
    assert identify_base(folder, "x") == identify_base(DEMO_BASE, "x")


def test_what_does_not_concern_adapters_does_not_count(folder: Path) -> None:
    edit_config(folder, max_position_embeddings=256, eos_token_id=3)
    (folder / "chat_template.jinja").write_text("")
    (folder / "generation_config.json").unlink()
    assert identify_base(folder, "x") == identify_base(DEMO_BASE, "x")


@pytest.mark.parametrize("how", ["trained again", "one tensor", "shape", "renamed file", "one more file"])
def test_another_model_is_another_base(folder: Path, how: str) -> None:
    path = folder / WEIGHTS
    tensors = load_file(path)
    if how == "trained again":  # headers and sizes stay what they were
        save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, path, {"format": "pt"})
        assert path.stat().st_size == (DEMO_BASE / WEIGHTS).stat().st_size
    elif how == "one tensor":
        name = max(tensors, key=lambda name: tensors[name].numel())
        save_file(tensors | {name: torch.zeros_like(tensors[name])}, path, {"format": "pt"})
    elif how == "shape":
        edit_config(folder, num_key_value_heads=4)
    elif how == "renamed file":
        path.rename(folder / "model-00001-of-00001.safetensors")
    else:
        save_file({"x": torch.zeros(1)}, folder / "more.safetensors")
    assert identify_base(folder, "x").fingerprint != identify_base(DEMO_BASE, "x").fingerprint


def test_files_that_are_no_safetensors_do_no_harm(folder: Path) -> None:
    before = identify_base(folder, "x")
    (folder / WEIGHTS).write_bytes(b"\xff" * 5)
    assert identify_base(folder, "x") != before
    (folder / WEIGHTS).write_bytes(b"")
    assert identify_base(folder, "x") != before
