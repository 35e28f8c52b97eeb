"""Layers with a recurrent state in Triton, the host side. The device side is `recurrence_device.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..gated_delta import GatedDelta
from ..mamba import Mamba
from ..recurrence import LayerState, Rule, StateBatch
from ..short_convolution import ShortConvolution
from .recurrence_device import convolution_kernel, gated_norm_kernel, recurrence_kernel
from .tile_sizes import next_power_of_2

_ROWS = 16  # of a tile of the convolution
_CHANNELS = 128  # of such a tile, where heads do not say
_NORMED = 1024  # elements that one program norms, where they are not those of one part


@dataclass(frozen=True)
class RecurrenceTuning:
    """Sizes that change the speed, and the result only by rounding. `benchmarks/gpu/sweep.py` times other values."""

    matrix: int = 1024  # elements of a head's matrix that a program holds
    least_columns: int = 8  # of these: a sector of memory
    stages: int = 3  # rows that are loaded ahead, by software pipelining, and the one that is computed
    warps: int = 1


class TritonRecurrence:
    """`recurrence.RecurrentKernel`. Never waits for the device.

    Launches depend on tensors and their shapes alone: a CUDA graph can record them.
    """

    def __init__(self, tuning: RecurrenceTuning | None = None) -> None:
        self._tuning = tuning or RecurrenceTuning()
        self._places: WeakKeyDictionary[LayerState, _Places] = WeakKeyDictionary()

    def __call__(
        self, x: torch.Tensor, rule: Rule, pool: torch.Tensor, state: LayerState, batch: StateBatch
    ) -> torch.Tensor:
        """See `recurrence.RecurrentKernel`."""
        assert x.shape[1] == rule.width and x.dtype == pool.dtype, "x has the columns of the rule, and the pool's dtype"
        assert pool.is_contiguous() and pool[0].nbytes % 4 == 0, "a page is a run of whole float32 elements"
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((len(x), rule.num_out), dtype=x.dtype, device=x.device)
        if not len(x):
            return out
        tables = _tables(batch)
        if isinstance(rule, ShortConvolution):
            _convolve(x, rule, rule.bias, out, 0, pool, state, tables, is_gated=True)
            return out
        assert isinstance(rule, GatedDelta | Mamba), "there is no other rule"
        places = self._places.get(state)
        if places is None:
            places = self._places[state] = _Places.of(state, pool)
        if isinstance(rule, GatedDelta):
            bias, first, dtype = None, 0, torch.float32  # keys and queries of length 1 are not rounded
        else:
            bias, first, dtype = rule.conv_bias, rule.num_out, x.dtype
        mixed = torch.empty((len(x), rule.num_channels), dtype=dtype, device=x.device)
        _convolve(x, rule, bias, mixed, first, pool, state, tables)
        _follow(x, mixed, rule, out, pool, places, tables, self._tuning)
        _gate(x, rule, out)
        return out


@dataclass(frozen=True)
class _Places:
    """Where the heads of a layer's state lie, on the device."""

    pages: torch.Tensor  # [num_heads] int32
    offsets: torch.Tensor  # [num_heads] int32
    is_aligned: bool  # to 16 bytes

    @staticmethod
    def of(state: LayerState, pool: torch.Tensor) -> _Places:
        is_aligned = pool[0].nbytes % 16 == 0 and all(offset % 4 == 0 for _, offset in state.heads)
        return _Places(state.head_pages.to(pool.device), state.head_offsets.to(pool.device), is_aligned)


def _tables(batch: StateBatch) -> dict[str, Any]:
    """The kernels' arguments that say which rows go on from which state."""
    assert batch.source.is_contiguous() and batch.target.is_contiguous(), "tables of pages are contiguous"
    return {
        "segment_rows": batch.segment_rows,
        "sequence_segments": batch.sequence_segments,
        "source": batch.source,
        "target": batch.target,
        "is_fresh": batch.is_fresh.view(torch.uint8),
        "num_state_pages": batch.source.shape[1],
    }


def _convolve(
    x: torch.Tensor,
    rule: GatedDelta | Mamba | ShortConvolution,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    first: int,
    pool: torch.Tensor,
    state: LayerState,
    tables: dict[str, Any],
    *,
    is_gated: bool = False,
) -> None:
    """Writes what the convolution of a rule gives to `out`. `first`: column of x where its inputs begin."""
    key_blocks, key_dim, width, num_blocks = 0, _CHANNELS, _CHANNELS, -(-rule.num_channels // _CHANNELS)
    if isinstance(rule, GatedDelta):
        key_blocks, key_dim, width = 2 * rule.num_key_heads, rule.key_dim, rule.value_dim
        num_blocks = key_blocks + rule.num_value_heads
    convolution_kernel[((len(tables["sequence_segments"]) - 1) * num_blocks,)](
        x,
        rule.taps,
        bias,
        out,
        pool,
        page_stride=pool.stride(0),
        conv_offset=state.conv_offset,
        conv_page=state.conv_page,
        **tables,
        X_ROW=x.stride(0),
        FIRST=first,
        CHANNELS=rule.num_channels,
        KEPT=rule.num_kept,
        GATED=is_gated,
        KEY_BLOCKS=key_blocks,
        KEY_DIM=key_dim,
        WIDTH=width,
        NUM_BLOCKS=num_blocks,
        BLOCK=next_power_of_2(max(key_dim, width)),
        ROWS=_ROWS,
        KEPT_ROWS=next_power_of_2(max(rule.num_kept, 1)),
        num_warps=4,
    )


def _follow(
    x: torch.Tensor,
    mixed: torch.Tensor,
    rule: GatedDelta | Mamba,
    out: torch.Tensor,
    pool: torch.Tensor,
    places: _Places,
    tables: dict[str, Any],
    tuning: RecurrenceTuning,
) -> None:
    """Writes what the matrices give of each row to `out`, and brings them up to date."""
    key_dim, value_dim = rule.head_shape
    keys = next_power_of_2(key_dim)
    columns = min(max(tuning.matrix // keys, tuning.least_columns), next_power_of_2(value_dim))
    num_blocks = -(-value_dim // columns)
    if isinstance(rule, GatedDelta):
        num_heads, num_keys = rule.num_value_heads, rule.num_key_heads
        queries, keys_begin, values = 0, num_keys * key_dim, 2 * num_keys * key_dim
        betas = rule.num_channels + rule.num_out
        steps, skip, limits = betas + num_heads, None, (0.0, math.inf)
    else:
        num_heads, num_keys = rule.num_heads, rule.num_groups
        values, keys_begin, queries = 0, rule.num_out, rule.num_out + num_keys * key_dim
        betas = steps = rule.num_out + rule.num_channels
        skip, limits = rule.skip, rule.step_limits
    recurrence_kernel[((len(tables["sequence_segments"]) - 1) * num_heads * num_blocks,)](
        x,
        mixed,
        rule.decay,
        rule.dt_bias,
        skip,
        out,
        pool.flatten(1).view(torch.float32),
        places.pages,
        places.offsets,
        page_stride=pool.stride(0) * pool.element_size() // 4,
        smallest_step=float(limits[0]),
        largest_step=float(limits[1]),
        **tables,
        X_ROW=x.stride(0),
        FIRST_KEYS=keys_begin,
        FIRST_QUERIES=queries,
        FIRST_VALUES=values,
        FIRST_STEPS=steps,
        FIRST_BETAS=betas,
        CHANNELS=rule.num_channels,
        HEADS=num_heads,
        PER_KEY=num_heads // num_keys,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEYS=keys,
        COLUMNS=columns,
        NUM_BLOCKS=num_blocks,
        ALIGNED=places.is_aligned,
        STAGES=tuning.stages,
        num_warps=tuning.warps,
    )


def _gate(x: torch.Tensor, rule: GatedDelta | Mamba, out: torch.Tensor) -> None:
    """Norms and gates results in place."""
    if isinstance(rule, GatedDelta):
        first, num_parts, gates_first = rule.num_channels, rule.num_value_heads, False
    else:
        first, num_parts, gates_first = 0, rule.num_groups, rule.gates_first or rule.norm is None
    width = rule.num_out // num_parts
    block = next_power_of_2(width)
    together = min(max(_NORMED // block, 1), next_power_of_2(num_parts))
    num_blocks = -(-num_parts // together)
    gated_norm_kernel[(len(x) * num_blocks,)](
        x,
        rule.norm,
        out,
        rule.eps,
        X_ROW=x.stride(0),
        FIRST=first,
        PARTS=num_parts,
        WIDTH=width,
        IS_DELTA=isinstance(rule, GatedDelta),
        GATES_FIRST=gates_first,
        BLOCK=block,
        TOGETHER=together,
        NUM_BLOCKS=num_blocks,
        num_warps=min(max(block * together // 512, 1), 16),
    )
