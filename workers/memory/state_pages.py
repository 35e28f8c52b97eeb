"""Where the recurrent state of a sequence lies in pages of the pool.

A state takes as many pages for every sequence, wherever in the pool they are. Of each layer with a state it has one
piece for each value head, `[key_dim, value_dim]` float32, and one with the newest inputs of the convolution. No piece
lies in two pages. So KV, states and adapters compete for one memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.gated_delta import LayerState
from ..models.sharding import ModelSharding

_ALIGNMENT = 64  # bytes, of each piece


@dataclass(frozen=True)
class StateLayout:
    """The pieces of a worker's part of a state. All workers of a gang have states of as many pages."""

    num_pages: int
    layers: tuple[LayerState, ...]  # by layer with a recurrent state


NO_STATE = StateLayout(0, ())


def state_layout(sharding: ModelSharding, page_elements: int, dtype: torch.dtype) -> StateLayout:
    """`page_elements`: of the pool's `dtype` in a page. Raises ValueError if a page is too small for a piece."""
    recurrent = sharding.config.recurrent
    if recurrent is None:
        return NO_STATE
    page_bytes, page, at = page_elements * dtype.itemsize, 0, 0
    num_heads = recurrent.num_value_heads // sharding.degree
    head_bytes = recurrent.key_dim * recurrent.value_dim * torch.float32.itemsize
    conv_bytes = (recurrent.kernel - 1) * (recurrent.num_channels // sharding.degree) * dtype.itemsize
    needed = _aligned(max(head_bytes, conv_bytes))
    if needed > page_bytes:
        raise ValueError(
            f"a page has {page_bytes} bytes, and a piece of this base's recurrent state takes {needed}: a block_size "
            f"that is {-(-needed // page_bytes)} times as large is needed"
        )

    def place(num_bytes: int) -> tuple[int, int]:
        """The page of the next piece, and its first byte there."""
        nonlocal page, at
        if at + num_bytes > page_bytes:
            page, at = page + 1, 0
        start, at = at, at + _aligned(num_bytes)
        return page, start

    layers = []
    for _ in sharding.config.recurrent_layers:
        heads = [place(head_bytes) for _ in range(num_heads)]
        conv_page, conv_start = place(conv_bytes)
        layers.append(
            LayerState(
                torch.tensor([page for page, _ in heads], dtype=torch.int32),
                torch.tensor([start // torch.float32.itemsize for _, start in heads], dtype=torch.int32),
                conv_page,
                conv_start // dtype.itemsize,
            )
        )
    return StateLayout(page + 1, tuple(layers))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
