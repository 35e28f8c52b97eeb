"""Folders that hold no adapter of PEFT's are called what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.adapters.format.folder import folders_with_adapter, missing, no_adapter


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["adapter_config.json", "adapter_model.bin"], "save_pretrained(..., safe_serialization=True)"),
        (["adapter_config.json", "adapters.safetensors", "0000100_adapters.safetensors"], "mlx-lm"),
        (["adapter_model-00001-of-00002.safetensors", "adapter_model.safetensors.index.json"], "in several files"),
        (["adapter_config.json", "adapter_model.pt", "model-00001-of-00002.safetensors"], "torchtune"),
        (["lit_model.pth.lora", "hyperparameters.yaml"], "LitGPT"),
        (["adapter_config.json", "pytorch_adapter.bin"], "AdapterHub"),
        (["iter_0000100", "latest_checkpointed_iteration.txt"], "Megatron"),
        (["__0_0.distcp", ".metadata"], "Megatron"),
        (["global_step20", "zero_to_fp32.py", "latest"], "DeepSpeed"),
        (["config.json", "model.safetensors"], "a whole model and no adapter"),
    ],
)
def test_a_folder_of_another_trainer_is_named(names: list[str], named: str) -> None:
    assert named in no_adapter(names)
    assert missing("adapter_config.json", names).startswith("adapter_config.json is missing: an adapter folder holds")


def test_an_unknown_folder_is_no_more_than_that() -> None:
    assert no_adapter(["notes.txt"]) == ""
    assert missing("adapter_model.safetensors", []) == (
        "adapter_model.safetensors is missing: "
        "an adapter folder holds adapter_config.json and adapter_model.safetensors"
    )


def test_folders_below_it_go_first(tmp_path: Path) -> None:
    for name in ("checkpoint-20", "checkpoint-40", "logs"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-20", "checkpoint-40"):
        (tmp_path / name / "adapter_config.json").touch()
    assert no_adapter(["model.safetensors"], folders_with_adapter(tmp_path)) == (
        "adapters are in folders below it (checkpoint-20, checkpoint-40): give one of these"
    )
