"""Paged attention in Triton, the host side: what is launched for a batch.

The device side is `attention_device.py`, and `kv_device.py` for rotary embedding and the write of KV.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..attention import AttentionBatch
from .attention_device import chunk_kernel, combine_kernel, decode_kernel
from .kv_device import write_kv_kernel

_LOG2_E = math.log2(math.e)
_LEAST_KEYS = 128  # fewest keys of a split: for fewer, a partial result costs more than it saves


@dataclass(frozen=True)
class AttentionTuning:
    """Sizes that change the speed, and the result only by rounding. `benchmarks/gpu/sweep.py` times other values."""

    programs: int = 1056  # aimed at in a decode launch: eight for each of an H200's 132 multiprocessors
    most_splits: int = 32
    decode_keys: int = 64  # keys of a tile, for heads of up to 128 elements; half as many for wider heads
    decode_warps: int = 4
    decode_stages: int = 3  # tiles that are loaded ahead, by software pipelining
    chunk_keys: int = 64
    chunk_stages: int = 2


@dataclass(frozen=True)
class _Launch:
    """Which rows of a batch each kernel computes, found once for all layers.

    For a batch of decodes alone all tensors are None: the kernels need no tables.
    """

    batch: AttentionBatch
    shape: tuple[int, int]  # heads of a group, head size
    num_decodes: int
    decode_rows: torch.Tensor | None  # [num_decodes] int32; None: row i is sequence i
    decode_sequences: torch.Tensor | None  # [num_decodes] int32
    blocks: torch.Tensor | None  # [num_blocks, 3] int32, see `chunk_kernel`
    block_rows: int  # rows of a tile of queries: tokens times heads of a group

    @staticmethod
    def make(batch: AttentionBatch, group: int, head_dim: int, device: torch.device) -> _Launch:
        starts = batch.query_starts
        counts = [end - start for start, end in itertools.pairwise(starts)]
        if all(count == 1 for count in counts):
            return _Launch(batch, (group, head_dim), len(counts), None, None, None, 0)
        decodes = [sequence for sequence, count in enumerate(counts) if count == 1]
        widest = 128 if head_dim <= 128 else 64
        block_rows = max(min(widest, triton.next_power_of_2(max(counts) * group)), 32, triton.next_power_of_2(group))
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
        flat = [*rows, *decodes, *(number for block in blocks for number in block[1:])]
        staged = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
        staged = staged.to(device, non_blocking=True)
        num = len(decodes)
        blocks_on_device = staged[2 * num :].view(-1, 3)
        return _Launch(batch, (group, head_dim), num, staged[:num], staged[num : 2 * num], blocks_on_device, block_rows)


class TritonAttention:
    """`attention.WriteKV` and `attention.PagedAttention`.

    In a batch of decodes a row with a negative position is padding: nothing is written for it, and its result is zero.
    A launch for decodes alone depends on the batch's tensors and their shapes, not on its lists, so that a CUDA graph
    can capture it.
    """

    def __init__(self, tuning: AttentionTuning | None = None) -> None:
        self._tuning = tuning or AttentionTuning()
        self._launch: _Launch | None = None  # of the last batch, which all layers of a step share

    def write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """See `attention.WriteKV`."""
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        _check(q, k, v, kv)
        turned = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        block = min(16, triton.next_power_of_2(num_heads))
        parts = triton.cdiv(num_heads, block) + triton.cdiv(num_kv_heads, block)
        if num_rows:
            write_kv_kernel[(num_rows, parts)](
                q,
                k,
                v,
                rotary,
                kv,
                batch.positions,
                batch.row_pages,
                batch.row_slots,
                turned,
                *(stride for x in (q, k, v) for stride in x.stride()[:2]),
                *kv.stride()[:3],
                HEADS=num_heads,
                KV_HEADS=num_kv_heads,
                HEAD_DIM=head_dim,
                HALF=triton.next_power_of_2(head_dim // 2),
                BLOCK_HEADS=block,
                num_warps=4,
            )
        return turned

    def paged_attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `attention.PagedAttention`."""
        _check(q, kv)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch = self._launch_of(batch, q, kv)
        scale_in, scale_out = scale * _LOG2_E, 1.0
        if softcap is not None:  # softcap * tanh(s / softcap), where tanh is computed from an exponential
            scale_in, scale_out = 2 * _LOG2_E * scale / softcap, softcap * _LOG2_E
        head_dim = q.shape[2]
        shared: dict[str, Any] = {
            "WINDOW": window is not None,
            "SOFTCAP": softcap is not None,
            "GROUP": q.shape[1] // kv.shape[3],
            "HEAD_DIM": head_dim,
            "DIM": max(16, triton.next_power_of_2(head_dim)),
            "PAGE": kv.shape[2],
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }
        numbers = (scale_in, scale_out, window or 0, *q.stride()[:2], out.stride(0), *kv.stride()[:3])
        if launch.num_decodes:
            self._decode(q, kv, batch, launch, out, numbers, shared)
        if launch.blocks is not None and len(launch.blocks):
            chunk_kernel[(len(launch.blocks), kv.shape[3])](
                q,
                kv,
                batch.pages,
                batch.page_starts,
                batch.positions,
                launch.blocks,
                out,
                *numbers,
                **shared,
                BLOCK_ROWS=launch.block_rows,
                BLOCK=_keys(self._tuning.chunk_keys, head_dim),
                num_warps=_chunk_warps(launch.block_rows, shared["DIM"]),
                num_stages=self._tuning.chunk_stages,
            )
        return out

    def _decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
        launch: _Launch,
        out: torch.Tensor,
        numbers: tuple[float, ...],
        shared: dict[str, Any],
    ) -> None:
        num_kv_heads, group, head_dim = kv.shape[3], shared["GROUP"], shared["HEAD_DIM"]
        tuning, most_keys = self._tuning, batch.most_pages * kv.shape[2]
        splits = _num_splits(launch.num_decodes * num_kv_heads, most_keys, tuning)
        partial = stats = out
        if splits > 1:
            shape = (launch.num_decodes, num_kv_heads, splits, group)
            partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
            stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        tiles = {"BLOCK": _keys(tuning.decode_keys, head_dim), "SPLITS": splits, "LEAST": _LEAST_KEYS}
        decode_kernel[(launch.num_decodes, num_kv_heads, splits)](
            q,
            kv,
            batch.pages,
            batch.page_starts,
            batch.positions,
            launch.decode_rows,
            launch.decode_sequences,
            out,
            partial,
            stats,
            *numbers,
            **shared,
            **tiles,
            GROUP_ROWS=max(16, triton.next_power_of_2(group)),
            num_warps=tuning.decode_warps,
            num_stages=tuning.decode_stages,
        )
        if splits > 1:
            combine_kernel[(launch.num_decodes, q.shape[1])](
                partial,
                stats,
                batch.positions,
                launch.decode_rows,
                out,
                numbers[2],
                out.stride(0),
                WINDOW=shared["WINDOW"],
                GROUP=group,
                HEAD_DIM=head_dim,
                DIM=shared["DIM"],
                **tiles,
                num_warps=4,
            )

    def _launch_of(self, batch: AttentionBatch, q: torch.Tensor, kv: torch.Tensor) -> _Launch:
        shape = (q.shape[1] // kv.shape[3], q.shape[2])
        if self._launch is None or self._launch.batch is not batch or self._launch.shape != shape:
            self._launch = _Launch.make(batch, *shape, q.device)
        return self._launch


def _keys(narrow: int, head_dim: int) -> int:
    """Keys of a tile: `narrow` for narrow heads, half of it for wide ones."""
    return narrow if head_dim <= 128 else narrow // 2


def _chunk_warps(block_rows: int, dim: int) -> int:
    """Warps of a program of `chunk_kernel`: enough that its sums and weights stay in registers."""
    return 8 if block_rows * dim >= 128 * 128 or (block_rows == 128 and dim == 64) else 4


def _num_splits(num_programs: int, most_keys: int, tuning: AttentionTuning) -> int:
    """Splits of a decode, a power of two: enough programs to fill the GPU, but at least _LEAST_KEYS keys for each."""
    wanted = triton.next_power_of_2(triton.cdiv(tuning.programs, num_programs))
    useful = triton.next_power_of_2(triton.cdiv(most_keys, _LEAST_KEYS))
    return int(min(wanted, useful, tuning.most_splits))


def _check(*tensors: torch.Tensor) -> None:
    kv = tensors[-1]
    assert all(x.dtype == kv.dtype and x.stride(-1) == 1 for x in tensors), "heads are contiguous and of one dtype"
    assert kv.stride(3) == kv.shape[4], "the heads of a token lie side by side in its page"
