"""Reads one worker's part of the rule of a layer with a recurrent state from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.gated_delta import GatedDelta
from ...kernels.mamba import Mamba
from ...kernels.recurrence import Rule
from ...kernels.short_convolution import ShortConvolution
from .layers import GroupNorm
from .recurrent_config import ConvolutionConfig, DeltaConfig, MambaConfig, RecurrentConfig
from .sharding import ModelSharding
from .weights import WeightSource


def load_rule(config: RecurrentConfig, sharding: ModelSharding, prefix: str, checkpoint: WeightSource) -> Rule:
    """`prefix`: of the names of the layer's tensors. Raises ValueError for missing and misshapen ones."""
    tensors = _Tensors(config, sharding, prefix, checkpoint)
    if isinstance(config, ConvolutionConfig):
        return ShortConvolution(*tensors.conv("conv", config.has_bias))
    if isinstance(config, MambaConfig):
        return _mamba(config, sharding, tensors)
    assert isinstance(config, DeltaConfig)
    return _gated_delta(config, sharding, tensors)


def load_group_norm(
    config: RecurrentConfig, sharding: ModelSharding, prefix: str, checkpoint: WeightSource
) -> GroupNorm | None:
    """Where workers share groups of heads; None: the rule norms what it gives."""
    if not isinstance(config, MambaConfig) or not config.norm_spans(sharding.degree):
        return None
    weight = _Tensors(config, sharding, prefix, checkpoint).norm(config.width)
    return GroupNorm(
        weight, sharding.config.norm_eps, config.groups(sharding.rank, sharding.degree)[0], config.num_groups
    )


@dataclass(frozen=True)
class _Tensors:
    config: RecurrentConfig
    sharding: ModelSharding
    prefix: str
    checkpoint: WeightSource

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self.checkpoint.take(f"{self.prefix}{name}", shape)

    def conv(self, name: str, has_bias: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """`[this worker's channels, kernel]`, and biases of these channels in float32; zeros where there are none."""
        num_channels = self.config.num_channels
        taps = self._channels(self.take(f"{name}.weight", num_channels, 1, self.config.kernel).squeeze(1))
        if not has_bias:
            return taps, torch.zeros(len(taps), device=taps.device)
        return taps, self._channels(self.take(f"{name}.bias", num_channels)).float()

    def heads(self, name: str) -> torch.Tensor:
        """A number of each of this worker's heads, float32."""
        return self.take(name, self.config.num_heads)[slice(*self.sharding.recurrent.heads)].float()

    def norm(self, width: int) -> torch.Tensor:
        """Of this worker's results, float32."""
        return self.take("norm.weight", width)[slice(*self.sharding.recurrent.inputs)].float()

    def _channels(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor[start:stop] for start, stop in self.sharding.recurrent.channels])


def _gated_delta(config: DeltaConfig, sharding: ModelSharding, tensors: _Tensors) -> GatedDelta:
    return GatedDelta(
        tensors.conv("conv1d")[0],
        -tensors.heads("A_log").exp(),
        tensors.heads("dt_bias"),
        tensors.take("norm.weight", config.value_dim).float(),
        sharding.config.norm_eps,
        config.num_key_heads // sharding.degree,
        config.num_value_heads // sharding.degree,
        config.key_dim,
        config.value_dim,
    )


def _mamba(config: MambaConfig, sharding: ModelSharding, tensors: _Tensors) -> Mamba:
    """Without its norm where workers share a group: see `load_group_norm`."""
    first, stop = config.groups(sharding.rank, sharding.degree)
    return Mamba(
        *tensors.conv("conv1d", config.has_conv_bias),
        -tensors.heads("A_log").exp(),
        tensors.heads("dt_bias"),
        tensors.heads("D"),
        tensors.norm(config.width) if config.has_norm and not config.norm_spans(sharding.degree) else None,
        sharding.config.norm_eps,
        config.num_heads // sharding.degree,
        stop - first,
        config.head_dim,
        config.state_size,
        config.step_limits,
        config.gates_first,
    )
