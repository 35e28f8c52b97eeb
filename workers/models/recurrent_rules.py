"""Reads one worker's part of the rule of a layer with a recurrent state from a checkpoint."""

from __future__ import annotations

import torch

from ...kernels.gated_delta import GatedDelta
from .recurrent_config import DeltaConfig, RecurrentConfig
from .sharding import ModelSharding
from .weights import WeightSource


def load_rule(config: RecurrentConfig, sharding: ModelSharding, prefix: str, checkpoint: WeightSource) -> GatedDelta:
    """`prefix`: of the names of the layer's tensors. Raises ValueError for missing and misshapen ones."""
    part, eps = sharding.recurrent, sharding.config.norm_eps

    def numbers(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.take(f"{prefix}{name}", shape)

    assert isinstance(config, DeltaConfig)
    conv = numbers("conv1d.weight", config.num_channels, 1, config.kernel).squeeze(1)
    heads, num_heads = slice(*part.heads), config.num_value_heads
    return GatedDelta(
        torch.cat([conv[start:stop] for start, stop in part.channels]),
        -numbers("A_log", num_heads)[heads].float().exp(),
        numbers("dt_bias", num_heads)[heads].float(),
        numbers("norm.weight", config.value_dim).float(),
        eps,
        config.num_key_heads // sharding.degree,
        num_heads // sharding.degree,
        config.key_dim,
        config.value_dim,
    )
