"""The arguments that a forward pass hands to every layer beside the hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...adapters.adapter import MODULES
from ...kernels.attention import AttentionBatch, LayerKV
from ...kernels.backend import Kernels
from ...kernels.expert_lora import ExpertLoraBatch
from ...kernels.lora import LoraBatch
from ..parallel import Parallel

# Modules that share an input are computed together, with one product of the base, one shrink and one expand. These are
# their indices in MODULES.
QKV = tuple(MODULES.index(name) for name in ("q_proj", "k_proj", "v_proj"))
OUTPUT = (MODULES.index("o_proj"),)
GATE_UP = tuple(MODULES.index(name) for name in ("gate_proj", "up_proj"))
DOWN = (MODULES.index("down_proj"),)


@dataclass(frozen=True)
class ForwardContext:
    """One step's batch as the layers see it."""

    kernels: Kernels
    parallel: Parallel
    pool: torch.Tensor  # [num_pages, num_layers, slab]
    attention: AttentionBatch
    lora: LoraBatch | None  # None: no row has an adapter
    expert_lora: ExpertLoraBatch | None  # None: no row has an adapter with parts for experts
    rotary: tuple[torch.Tensor, ...]  # by layer, [num_positions, 2, head_dim // 2] each
    kv: tuple[LayerKV, ...]  # by layer, views of the pool
