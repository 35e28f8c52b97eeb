"""What a folder holds that is not an adapter as PEFT saves it, by the names of its files."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ..errors import listed
from .peft import CONFIG_FILE, TENSORS_FILE

_NO_PICKLE = "pickle is never read; save the adapter with save_pretrained(..., safe_serialization=True)"
# Names of files that other trainers write, and what is to be done: as in the code of mlx-lm 0.32, LitGPT 0.5, adapters
# 1.3 (AdapterHub), torchtune 0.6 and ms-swift 4.6; Megatron's and DeepSpeed's are those of their documentation.
_OTHER_FILES: tuple[tuple[str, str], ...] = (
    (r"adapter_model\.bin", f"adapter_model.bin: {_NO_PICKLE}"),
    (
        r"adapter_model-\d+-of-\d+\.safetensors|adapter_model\.safetensors\.index\.json",
        f"an adapter in several files: join them to one {TENSORS_FILE}, by safetensors.torch.load_file of each and "
        "save_file of all",
    ),
    (
        r"(?:\d+_)?adapters\.safetensors",
        "an adapter of mlx-lm, whose matrices are transposed and have other names: write lora_a.T as lora_A.weight and "
        "lora_b.T as lora_B.weight under PEFT's names, with lora_alpha = scale * rank",
    ),
    (
        r"adapter_model\.pt",
        "a checkpoint of torchtune, which has its own form: its checkpointer writes PEFT's beside it with "
        "safe_serialization: True, of families other than Phi",
    ),
    (
        r"lit_model\.pth(?:\.lora)?",
        "a checkpoint of LitGPT, which has no command that writes LoRA in PEFT's form: train with PEFT, or serve the "
        "whole model that `litgpt merge_lora` and `litgpt convert_from_litgpt` write",
    ),
    (
        r"(?:pytorch_)?adapter\.(?:bin|safetensors)|adapter_setup\.json",
        "an adapter of AdapterHub's adapters, which computes otherwise than PEFT: train with PEFT",
    ),
    (
        r".*\.distcp|mp_rank_\d+.*|iter_\d+|latest_checkpointed_iteration\.txt",
        "a checkpoint of Megatron: export the adapter for Hugging Face's PEFT with the trainer that wrote it (NeMo: "
        "`llm.export_ckpt(..., target='hf-peft')`; ms-swift: `megatron export --to_hf true --merge_lora false`)",
    ),
    (
        r"global_step\d+|zero_to_fp32\.py|zero_pp_rank_.*",
        "a checkpoint of DeepSpeed, to go on with training: load it there and call save_pretrained",
    ),
    (
        r"(?:model|pytorch_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)|model\.safetensors\.index\.json",
        "a whole model and no adapter: save the PEFT model before it is merged, or serve this one as a base",
    ),
)


def no_adapter(names: Collection[str], folders_with_one: Collection[str] = ()) -> str:
    """What the folder with files and folders of these names is instead; empty: one cannot say.

    `folders_with_one`: names of folders in it that hold an adapter.

    >>> no_adapter(["latest", "zero_to_fp32.py"])
    'it holds a checkpoint of DeepSpeed, to go on with training: load it there and call save_pretrained'
    >>> no_adapter(["optimizer.pt"], ["checkpoint-20", "checkpoint-40"])
    'adapters are in folders below it (checkpoint-20, checkpoint-40): give one of these'
    """
    if folders_with_one:
        return f"adapters are in folders below it ({listed(sorted(folders_with_one))}): give one of these"
    for pattern, content in _OTHER_FILES:
        if any(re.fullmatch(pattern, name) for name in names):
            return f"it holds {content}"
    return ""


def folders_with_adapter(folder: Path) -> list[str]:
    """Names of folders in it that hold a file of PEFT's config."""
    return [path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}")]


def missing(name: str, names: Collection[str], folders_with_one: Collection[str] = ()) -> str:
    """Says that the folder has no file `name`, one of the two that are needed, and what it is instead."""
    needed = f"{name} is missing: an adapter folder holds {CONFIG_FILE} and {TENSORS_FILE}"
    content = no_adapter(names, folders_with_one)
    return f"{needed}; {content}" if content else needed
