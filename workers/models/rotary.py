"""Rotary position embedding (RoFormer, arXiv 2104.09864) and its published ways to stretch the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from .rotary_config import (
    CHUNK_SCALING,
    LONGROPE,
    NO_ROTARY,
    PROPORTIONAL,
    QUERY_SCALING,
    RotaryConfig,
    yarn_amplitude,
)


def rotary_tables(
    configs: Sequence[RotaryConfig], head_dims: Sequence[int], num_positions: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """A table for each layer; equal configs of equal heads share a table."""
    cache: list[tuple[tuple[RotaryConfig, int], torch.Tensor]] = []
    tables = []
    for layer in zip(configs, head_dims, strict=True):
        table = next((table for other, table in cache if other == layer), None)
        if table is None:
            table = rotary_table(*layer, num_positions).to(device)
            cache.append((layer, table))
        tables.append(table)
    return tuple(tables)


def rotary_table(config: RotaryConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines and sines of each position, `[num_positions, 2, head_dim // 2]` in float32; see `head_order`.

    Where queries are scaled by their position there are 4: those of keys, then those of queries, times the scale.
    """
    num_rotated = config.num_rotated(head_dim)
    if config.kind == LONGROPE:
        frequencies, amplitude = _longrope(config, config.num_dimensions(head_dim), num_positions)
    else:
        frequencies, amplitude = _frequencies(config, config.num_dimensions(head_dim))
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    table = torch.zeros(num_positions, 2, head_dim // 2)
    table[:, 0] = 1.0
    table[:, :, : num_rotated // 2] = torch.stack((angles.cos(), angles.sin()), dim=1) * amplitude
    if QUERY_SCALING in config.options or CHUNK_SCALING[0] in config.options:
        scales = query_scales(config.options, torch.arange(num_positions))
        return torch.cat((table, table * scales[:, None, None]), dim=1)
    return table


def query_scales(options: Mapping[str, float], positions: torch.Tensor) -> torch.Tensor:
    """Float32: what the queries at these positions are multiplied by, more with each original context (Llama 4)."""
    if CHUNK_SCALING[0] in options:
        scale, floor = (options[key] for key in CHUNK_SCALING)
        return 1 + scale * torch.log1p(torch.floor((positions + 1.0) / floor))
    contexts = torch.floor(positions / options["original_max_position_embeddings"])
    return 1 + options[QUERY_SCALING] * torch.log(1 + contexts)


def _frequencies(config: RotaryConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Computed in transformers' order: another last bit of a frequency is 3e-4 of an angle at position 4,000."""
    plain = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.kind == NO_ROTARY:
        return torch.zeros_like(plain), 1.0
    if config.kind == PROPORTIONAL:  # the first of the pairs alone, at the frequencies of a head that is rotated whole
        plain[int(config.share * head_dim // 2) :] = 0.0
        return plain / config.options.get("factor", 1.0), 1.0
    if config.kind == "linear":
        return plain / config.options["factor"], 1.0
    if config.kind == "llama3":
        return _llama3(plain, config.options), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config, head_dim)
    return plain, 1.0


def _llama3(plain: torch.Tensor, options: Mapping[str, float]) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short waves are kept, waves between are interpolated."""
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    waves_in_context = options["original_max_position_embeddings"] / (2 * math.pi / plain)
    plain_share = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return (1 - plain_share) * plain / options["factor"] + plain_share * plain


def _longrope(config: RotaryConfig, num_rotated: int, num_positions: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753): each frequency has a factor, and long contexts have others.

    As in vLLM the context that is served decides which, so that a sequence's keys stay as they are while it grows.
    """
    original = config.options["original_max_position_embeddings"]
    short, long = config.factors
    factors = torch.tensor(long if num_positions > original else short)
    plain = config.theta ** (torch.arange(0, num_rotated, 2, dtype=torch.float32) / num_rotated)
    return 1.0 / (factors * plain), config.options["attention_factor"]


def _yarn(plain: torch.Tensor, config: RotaryConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071) §3.2 and §3.4: ramp between interpolation and extrapolation, and the amplitude."""
    options = config.options
    factor, context = options["factor"], options["original_max_position_embeddings"]

    def dimension_of(num_rotations: float) -> float:
        return head_dim * math.log(context / (num_rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low: float = dimension_of(options.get("beta_fast", 32.0))
    high: float = dimension_of(options.get("beta_slow", 1.0))
    if options.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    own_share, wavelengths = 1 - ramp, config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = 1.0 / (factor * wavelengths) * (1 - own_share) + plain * own_share
    return frequencies, yarn_amplitude(options)
