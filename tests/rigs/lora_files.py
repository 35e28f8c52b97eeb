"""Small uploads to test with: adapter_config.json and adapter_model.safetensors as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from motet.adapters.adapter import BaseShape
from motet.adapters.format.peft import MODULE_PATHS
from motet.adapters.packing.layout import AdapterLayout

SHAPE = BaseShape(
    num_layers=3,
    modules={
        "q_proj": (16, 16),
        "k_proj": (16, 8),
        "v_proj": (16, 8),
        "o_proj": (16, 16),
        "gate_proj": (16, 24),
        "up_proj": (16, 24),
        "down_proj": (24, 16),
    },
)
LAYOUT = AdapterLayout(SHAPE, slab=64, dtype="float32")


def name_of(layer: int, module: str, letter: str) -> str:
    return f"base_model.model.model.layers.{layer}.{MODULE_PATHS[module]}.lora_{letter}.weight"


@dataclass
class LoraFiles:
    """A valid upload. To make it invalid, change `config` or `tensors`, then `write`."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def config_bytes(self) -> bytes:
        return json.dumps(self.config).encode()

    def write(self, folder: Path) -> Path:
        path = folder / "upload.safetensors"
        save_file(self.tensors, path)
        return path


def lora_files(
    seed: int = 0,
    modules: tuple[str, ...] = ("q_proj", "v_proj", "down_proj"),
    rank: int = 4,
    ranks: Mapping[tuple[int, str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> LoraFiles:
    """An adapter of `modules` in all layers. `ranks`: exceptions to `rank`, for which the caller sets rank_pattern."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SHAPE.num_layers):
        for module in modules:
            num_in, num_out = SHAPE.modules[module]
            own = (ranks or {}).get((layer, module), rank)
            tensors[name_of(layer, module, "A")] = torch.randn(own, num_in, generator=generator).to(dtype)
            tensors[name_of(layer, module, "B")] = torch.randn(num_out, own, generator=generator).to(dtype)
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(modules), "bias": "none"}
    return LoraFiles({**facts, **config}, tensors)
