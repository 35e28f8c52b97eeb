"""Where the recurrent state of a sequence lies in pages of the pool. Needs no torch: launchers count these pages, too.

A state takes as many pages for every sequence, wherever in the pool they are. Of each layer with a state it has one
piece for each head that has a matrix, in float32, and one with the newest inputs of the convolution. No piece lies in
two pages. So KV, states and adapters compete for one memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sharding import ModelSharding

_ALIGNMENT = 64  # bytes, of each piece
_STATE_BYTES = 4  # of an element

Place = tuple[int, int]  # which of the state's pages, and the first byte there


@dataclass(frozen=True)
class LayerPlaces:
    """Of one layer's state."""

    heads: tuple[Place, ...]  # by head that has a matrix
    inputs: Place


@dataclass(frozen=True)
class StatePlaces:
    """Of a worker's part of a state. All workers of a gang have states of as many pages."""

    num_pages: int
    layers: tuple[LayerPlaces, ...]  # by layer with a recurrent state


NO_STATE = StatePlaces(0, ())


def state_places(sharding: ModelSharding, page_bytes: int, element_bytes: int) -> StatePlaces:
    """`element_bytes`: of the pool's dtype. Raises ValueError if a page is too small for a piece."""
    recurrent = sharding.config.recurrent
    if recurrent is None:
        return NO_STATE
    page = at = 0
    part = sharding.recurrent
    num_heads, head_bytes = part.heads[1] - part.heads[0], recurrent.head_size * _STATE_BYTES
    input_bytes = (recurrent.kernel - 1) * part.num_channels * element_bytes
    needed = _aligned(max(head_bytes, input_bytes))
    if needed > page_bytes:
        raise ValueError(
            f"a page has {page_bytes} bytes, and a piece of this base's recurrent state takes {needed}: a block_size "
            f"that is {-(-needed // page_bytes)} times as large is needed"
        )

    def place(num_bytes: int) -> Place:
        nonlocal page, at
        if at + num_bytes > page_bytes:
            page, at = page + 1, 0
        start, at = at, at + _aligned(num_bytes)
        return page, start

    layers = tuple(
        LayerPlaces(tuple(place(head_bytes) for _ in range(num_heads)), place(input_bytes))
        for _ in sharding.config.recurrent_layers
    )
    return StatePlaces(page + 1, layers)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
