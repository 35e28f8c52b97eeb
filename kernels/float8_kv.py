"""KV of eight bits: how a page holds it, for the kernels of every backend.

K and V are float8_e4m3fn as `float8.py` describes it, each with a scale in float32 for each token and head: the largest
magnitude of that head over 448, found when the token is written. So what is written depends on the token alone, not on
its neighbours, on how a prompt was cut, or on a calibration, and nothing is clipped. A page's part of a layer holds the
values of its tokens, `[2, block_size, num_kv_heads, head_dim]`, then their scales, `[2, num_kv_heads, block_size]`: the
scales of a head that one program reads lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALE_BYTES = 4


@dataclass(frozen=True)
class Float8KV:
    """One layer of a pool, K at index 0 and V at 1; strided views, as of `attention.LayerKV`."""

    values: torch.Tensor  # [num_pages, 2, block_size, num_kv_heads, head_dim] uint8, the bits of float8_e4m3fn
    scales: torch.Tensor  # [num_pages, 2, num_kv_heads, block_size] float32


def float8_view(pages: torch.Tensor, block_size: int, num_kv_heads: int, head_dim: int) -> Float8KV:
    """KV in the pages of one layer, `[num_pages, slab]` of any dtype, whose slabs are as long as KV needs."""
    content = pages.view(torch.uint8)
    num_values = 2 * block_size * num_kv_heads * head_dim
    values, scales = content[:, :num_values], content[:, num_values:].view(torch.float32)
    return Float8KV(
        values.unflatten(1, (2, block_size, num_kv_heads, head_dim)),
        scales.unflatten(1, (2, num_kv_heads, block_size)),
    )
