"""Paged attention of a batch's decodes in Triton, the host side. The device side is `decode_device.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention import AttentionBatch
from ..windows import window_kind
from .decode_device import SPLITS_OF_ITEM, combine_kernel, decode_kernel, split_kernel
from .tile_sizes import keys_of_tile, next_power_of_2

_ROOM = 4096  # splits of a launch that are listed, at most: their partial sums take 67 MB for 32 heads of 128
_DECODES_AT_ONCE = 256  # decodes whose splits are counted together
_SPLITS_AT_ONCE = 16  # splits that are added up together


@dataclass(frozen=True)
class DecodeTuning:
    """Sizes that change the speed, and the result only by rounding. `benchmarks/gpu/sweep.py` times other values."""

    programs: int = 1056  # of a launch, at most: eight for each of an H200's 132 multiprocessors
    split_keys: int = 256  # of a split, where no sequence has more than 128 of them and decodes are few
    long_split_keys: int = 1024  # likewise, where decodes alone fill the GPU: fewer partial sums to add up
    many: int = 64  # decodes times KV heads that do
    keys: int = 64  # of a tile, as `keys_of_tile` takes it
    warps: int = 4
    stages: int = 3  # tiles that are loaded ahead, by software pipelining


@dataclass(frozen=True)
class _Splits:
    """The splits of a batch's decodes, as `split_kernel` lists them."""

    items: torch.Tensor  # [room] int32
    starts: torch.Tensor  # [num_decodes + 2] int32
    is_whole: bool  # no sequence can have more than one split


@dataclass
class Decodes:
    """The decodes of a batch. Their splits are listed once for all layers with the same window.

    Launches depend on tensors and their shapes, not on lengths: a CUDA graph can record them.
    """

    batch: AttentionBatch
    num: int
    rows: torch.Tensor | None  # [num] int32; None: row i is sequence i
    sequences: torch.Tensor | None  # [num] int32
    tuning: DecodeTuning
    _splits: dict[tuple[int | None, int], _Splits] = field(default_factory=dict)  # by window and keys of a tile

    def attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        scales: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        window: int | None,
        numbers: tuple[float, ...],
        shared: dict[str, Any],
    ) -> None:
        """Writes the decodes' rows of `out`. `scales`: of KV of eight bits, whose values `kv` are.

        `numbers` and `shared`: arguments that all kernels of attention have in common.
        """
        num_kv_heads, group, head_dim = kv.shape[3], shared["GROUP"], shared["HEAD_DIM"]
        # With eight bits, registers hold both the bytes and their values: a tile has half as many keys.
        block = keys_of_tile(self.tuning.keys, head_dim * (kv.element_size() if scales is None else 4))
        is_many = self.num * num_kv_heads >= self.tuning.many
        splits = self._splits_of(
            window, kv.shape[2], block, self.tuning.long_split_keys if is_many else self.tuning.split_keys
        )
        room = splits.items.shape[0]
        if splits.is_whole:
            partial = stats = torch.empty(1, dtype=torch.float32, device=q.device)  # not used, but of its type
        else:
            assert room * q.shape[1] * head_dim < 2**31, "offsets of partial sums are 32 bits wide"
            partial = torch.empty((room, num_kv_heads, group, head_dim), dtype=torch.float32, device=q.device)
            stats = torch.empty((room, num_kv_heads, group, 2), dtype=torch.float32, device=q.device)
        programs = min(room, -(-self.tuning.programs // num_kv_heads))
        decode_kernel[(programs, num_kv_heads)](
            q,
            kv,
            scales,
            sinks,
            self.batch.pages,
            self.batch.page_starts,
            self.batch.positions,
            self.rows,
            self.sequences,
            splits.items,
            splits.starts,
            out,
            partial,
            stats,
            self.num,
            *numbers,
            **shared,
            GROUP_ROWS=max(16, next_power_of_2(group)),
            BLOCK=block,
            num_warps=self.tuning.warps,
            num_stages=self.tuning.stages,
        )
        if not splits.is_whole:
            combine_kernel[(self.num, q.shape[1])](
                partial,
                stats,
                sinks,
                self.rows,
                splits.starts,
                out,
                out.stride(0),
                GROUP=group,
                HEAD_DIM=head_dim,
                DIM=shared["DIM"],
                SPLITS=_SPLITS_AT_ONCE,
                num_warps=4,
            )

    def _splits_of(self, window: int | None, page: int, block: int, split_keys: int) -> _Splits:
        splits = self._splits.get((window, block))
        if splits is not None:
            return splits
        max_seen = min(self.batch.most_pages * page, window or self.batch.most_pages * page)
        num_splits = min(-(-max_seen // split_keys), SPLITS_OF_ITEM.value)
        room = max(self.num, min(self.num * num_splits, _ROOM))
        items = torch.empty(room, dtype=torch.int32, device=self.batch.positions.device)
        starts = torch.empty(self.num + 2, dtype=torch.int32, device=items.device)
        split_kernel[(self.num,)](
            self.batch.positions,
            self.rows,
            items,
            starts,
            self.num,
            window or 0,
            room,
            WINDOW=window_kind(window),
            KEYS=split_keys,
            BLOCK=block,
            AT_ONCE=_DECODES_AT_ONCE,
            num_warps=4,
        )
        self._splits[(window, block)] = splits = _Splits(items, starts, num_splits <= 1)
        return splits
