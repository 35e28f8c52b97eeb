"""Paged attention over KV of eight bits in plain torch: the twin."""

from __future__ import annotations

import torch

from ..attention import AttentionBatch
from ..float8 import FLOAT8
from ..float8_kv import Float8KV
from .attention import angles, attend_pages, rotated
from .float8 import PlainFloat8

_QUANTISE = PlainFloat8().quantise


def write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: torch.Tensor,
    kv: Float8KV,
    batch: AttentionBatch,
) -> torch.Tensor:
    """See `attention.KVWriter`. K is quantised as it comes from its rotation, in float32."""
    of_k, of_q = angles(rotary, batch)
    for side, x in enumerate((rotated(k, *of_k), v) if k.shape[1] else ()):
        values, scales = _QUANTISE(x.flatten(0, 1))
        kv.values[batch.row_pages, side, batch.row_slots] = values.view(torch.uint8).view(x.shape)
        kv.scales[batch.row_pages, side, :, batch.row_slots] = scales.view(x.shape[:2])
    return rotated(q, *of_q).to(q.dtype)


def paged_attention(
    q: torch.Tensor,
    kv: Float8KV,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `attention.PagedAttention`. In float32: what is rounded once more is the result."""

    def read(pages: torch.Tensor) -> torch.Tensor:
        return numbers_of(Float8KV(kv.values[pages], kv.scales[pages]))

    return attend_pages(q.float(), read, kv.values.shape[2], batch, scale, window, softcap, sinks).to(q.dtype)


def numbers_of(kv: Float8KV) -> torch.Tensor:
    """What the pages stand for, `[..., 2, block_size, num_kv_heads, head_dim]` in float32."""
    return kv.values.view(FLOAT8).float() * kv.scales.transpose(-1, -2).unsqueeze(-1)
