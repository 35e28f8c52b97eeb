"""Paged attention in Triton, the host side: what is launched for a batch.

The device side is `attention_device.py`, and `kv_device.py` for rotary embedding and the write of KV.
"""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import AttentionBatch, DerivedFromBatches
from ..float8_kv import SCALE_BYTES, Float8KV
from ..plain import attention as plain_attention
from ..staging import staged
from ..windows import window_kind
from .attention_device import chunk_kernel
from .decode import Decodes, DecodeTuning
from .kv_device import write_kv_kernel
from .tile_sizes import keys_of_tile, next_power_of_2

_LOG2_E = math.log2(math.e)
_MOST_DIMS = 512  # of a head


@dataclass(frozen=True)
class AttentionTuning:
    """Sizes that change the speed, and the result only by rounding. `benchmarks/gpu/sweep.py` times other values."""

    chunk_keys: int = 64  # keys of a tile, as `keys_of_tile` takes it
    chunk_stages: int = 3  # tiles that are loaded ahead, by software pipelining


@dataclass(frozen=True)
class _Launch:
    """Which rows of a batch each kernel computes, found once for all layers.

    For a batch of decodes alone no tables are made here.
    """

    decodes: Decodes
    blocks: torch.Tensor | None  # [num_blocks, 3] int32, see `chunk_kernel`
    block_rows: int  # rows of a tile of queries: tokens times heads of a group

    @staticmethod
    def make(batch: AttentionBatch, group: int, head_dim: int, q: torch.Tensor, tuning: DecodeTuning) -> _Launch:
        starts = batch.query_starts
        counts = [end - start for start, end in itertools.pairwise(starts)]
        if all(count == 1 for count in counts):
            return _Launch(Decodes(batch, len(counts), None, None, tuning), None, 0)
        decodes = [sequence for sequence, count in enumerate(counts) if count == 1]
        widest = 128 if head_dim <= 128 else 64
        if q.dtype == torch.float32:  # no matrix instructions: larger tiles spill, and take a minute to compile
            widest = 32
        block_rows = max(min(widest, next_power_of_2(max(counts) * group)), 32, next_power_of_2(group))
        tokens = block_rows // group
        # The blocks with the most keys come first, so that the last ones to run are short.
        blocks = sorted(
            (
                (
                    batch.context_lens[sequence] - count + first,
                    sequence,
                    starts[sequence] + first,
                    min(tokens, count - first),
                )
                for sequence, count in enumerate(counts)
                if count > 1
                for first in range(0, count, tokens)
            ),
            reverse=True,
        )
        rows = [starts[sequence] for sequence in decodes]
        numbers = array("i", [*rows, *decodes, *(number for block in blocks for number in block[1:])])
        (flat,) = staged(q.device, torch.frombuffer(numbers, dtype=torch.int32))
        num = len(decodes)
        return _Launch(
            Decodes(batch, num, flat[:num], flat[num : 2 * num], tuning), flat[2 * num :].view(-1, 3), block_rows
        )


class TritonAttention:
    """`attention.KVWriter` and `attention.PagedAttention`.

    In a batch of decodes a row with a negative position is padding: nothing is written for it, and its result is zero.
    A launch for decodes alone depends on the batch's tensors and their shapes, not on its lists, so that a CUDA graph
    can capture it.
    """

    def __init__(self, tuning: AttentionTuning | None = None, decode_tuning: DecodeTuning | None = None) -> None:
        self._tuning, self._decode_tuning = tuning or AttentionTuning(), decode_tuning or DecodeTuning()
        self._launches = DerivedFromBatches[_Launch]()

    def write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: torch.Tensor,
        kv: torch.Tensor | Float8KV,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """See `attention.KVWriter`."""
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        if num_kv_heads and not v.shape[1]:
            assert isinstance(kv, torch.Tensor), "KV of latent attention has no eight bits"
            return plain_attention.write_kv(q, k, v, rotary, kv, batch)
        kv, scales = _parts(kv)
        _check(kv, scales, q, k, v)
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        block = min(16, next_power_of_2(num_heads))
        parts = -(-num_heads // block) - (-num_kv_heads // block)
        if num_rows:
            write_kv_kernel[(num_rows, parts)](
                q,
                k,
                v,
                rotary,
                kv,
                scales,
                batch.positions,
                batch.row_pages,
                batch.row_slots,
                turned,
                *q.stride()[:2],
                *k.stride()[:2],
                *v.stride()[:2],
                *kv.stride()[:3],
                HEADS=num_heads,
                KV_HEADS=num_kv_heads,
                HEAD_DIM=head_dim,
                HALF=next_power_of_2(head_dim // 2),
                SIDES=rotary.shape[1],
                BLOCK_HEADS=block,
                num_warps=4,
            )
        return turned

    def paged_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor | Float8KV,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `attention.PagedAttention`. The plain twin computes heads of more than 512 elements."""
        if q.shape[2] > _MOST_DIMS and isinstance(kv, torch.Tensor):
            return plain_attention.paged_attention(q, kv, batch, scale, window, softcap, sinks)
        kv, scales = _parts(kv)
        _check(kv, scales, q)
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()), "sinks are float32"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch = self._launch_of(batch, q, kv)
        scale_in, scale_out = scale * _LOG2_E, 1.0
        if softcap is not None:  # softcap * tanh(s / softcap), where tanh is computed from an exponential
            scale_in, scale_out = 2 * _LOG2_E * scale / softcap, softcap * _LOG2_E
        head_dim = q.shape[2]
        shared: dict[str, Any] = {
            "WINDOW": window_kind(window),
            "SOFTCAP": softcap is not None,
            "GROUP": q.shape[1] // kv.shape[3],
            "HEAD_DIM": head_dim,
            "DIM": max(16, next_power_of_2(head_dim)),
            "PAGE": kv.shape[2],
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }
        numbers = (scale_in, scale_out, window or 0, *q.stride()[:2], out.stride(0), *kv.stride()[:3])
        if launch.decodes.num:
            launch.decodes.attend(q, kv, scales, sinks, out, window, numbers, shared)
        if launch.blocks is not None:
            chunk_kernel[(launch.blocks.shape[0], kv.shape[3])](
                q,
                kv,
                scales,
                sinks,
                batch.pages,
                batch.page_starts,
                batch.positions,
                launch.blocks,
                out,
                *numbers,
                **shared,
                BLOCK_ROWS=launch.block_rows,
                BLOCK=16
                if q.dtype == torch.float32
                else keys_of_tile(self._tuning.chunk_keys, head_dim * q.element_size()),
                num_warps=_chunk_warps(launch.block_rows, shared["DIM"], q.dtype),
                num_stages=self._tuning.chunk_stages,
            )
        return out

    def _launch_of(self, batch: AttentionBatch, q: torch.Tensor, kv: torch.Tensor) -> _Launch:
        shape = (q.shape[1] // kv.shape[3], q.shape[2])  # heads of a group, head size
        return self._launches.of(batch, lambda: _Launch.make(batch, *shape, q, self._decode_tuning), shape)


def _chunk_warps(block_rows: int, dim: int, dtype: torch.dtype) -> int:
    """Warps of a program of `chunk_kernel`: enough that its sums and weights stay in registers."""
    is_large = block_rows * dim >= 128 * 128 or (block_rows == 128 and dim == 64)
    return 8 if is_large or dtype == torch.float32 else 4


def _parts(kv: torch.Tensor | Float8KV) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values of a layer's KV, and their scales where it has eight bits."""
    return (kv.values, kv.scales) if isinstance(kv, Float8KV) else (kv, None)


def _check(kv: torch.Tensor, scales: torch.Tensor | None, *heads: torch.Tensor) -> None:
    dtype = heads[0].dtype if scales is not None else kv.dtype
    for x in heads:
        assert x.dtype == dtype, "heads are of one dtype"
        assert x.stride(-1) == 1, "heads are contiguous"
    assert kv.shape[3] == 1 or kv.stride(3) == kv.shape[4], "the heads of a token lie side by side in its page"
    if scales is not None:
        assert (kv.dtype, scales.dtype) == (torch.uint8, torch.float32), "values are bytes, scales float32"
        assert kv.stride(0) == scales.stride(0) * SCALE_BYTES, "scales lie in the pages of their values"
        assert scales.stride()[1:] == (scales.shape[2] * scales.shape[3], scales.shape[3], 1), "scales lie side by side"
