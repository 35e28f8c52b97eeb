"""How many pages of a sequence's KV are needed at once, where all layers see a window of its newest tokens."""

from __future__ import annotations

# Keys before a window that kernels for GPUs may read, and multiply by a weight of zero: a tile of FlashAttention's, the
# largest of all.
_TILE_KEYS = 256


def kept_window(window: int | None, device: str) -> int | None:
    """The newest tokens whose pages a sequence keeps, so that the next one sees a window of them; None: all.

    Kernels for GPUs read whole tiles of keys, and a key that is not seen must still be a number.
    """
    return window if window is None or device == "cpu" else window + _TILE_KEYS


def num_unseen_pages(num_tokens: int, block_size: int, window: int | None) -> int:
    """The first pages of a sequence that no layer sees any more, once so many of its tokens are computed.

    `window`: newest tokens that a token sees in any layer, itself included; None: some layer sees all.
    """
    return 0 if window is None else max(0, num_tokens + 1 - window) // block_size


def most_pages(num_tokens: int, block_size: int, window: int | None, max_tokens_per_step: int) -> int:
    """The most pages that a sequence of so many tokens holds at once.

    With a window: what the next token sees, and the tokens of two steps, since one is planned while another one runs.
    Neither end of these is that of a page, and decodes give pages back only when one is full.
    """
    num_pages = -(-num_tokens // block_size)
    if window is None:
        return num_pages
    return min(num_pages, -(-(window - 1 + 2 * max_tokens_per_step) // block_size) + 2)
