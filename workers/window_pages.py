"""A gang's limits, and how many pages of KV a sequence needs at once, also where layers see a window of its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Keys before a window that kernels for GPUs may read, and multiply by a weight of zero: a tile of FlashAttention's, the
# largest of all.
_TILE_KEYS = 256


@dataclass(frozen=True)
class FullLayers:
    """The layers that see all tokens, in a base whose other layers see a window.

    Their KV lies in the first slabs of a page. Once the window is past several pages of a sequence, one page, packed
    densely, holds what these layers have in all of them. Entries of page tables are numbers of slabs: the first one
    of a block of tokens.
    """

    num_full: int  # slabs with the KV that these layers have of a block of tokens
    num_slabs: int  # of a page

    @property
    def num_blocks(self) -> int:
        """Pages whose full layers one dense page holds."""
        return self.num_slabs // self.num_full

    def entries(self, pages: Iterable[int]) -> list[int]:
        """Of pages with the KV of all layers."""
        return [page * self.num_slabs for page in pages]

    def dense_entries(self, pages: Iterable[int]) -> list[int]:
        """Of the blocks in dense pages."""
        starts = range(0, self.num_blocks * self.num_full, self.num_full)
        return [page * self.num_slabs + start for page in pages for start in starts]


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


def most_pages(
    num_tokens: int,
    block_size: int,
    window: int | None,
    max_tokens_per_step: int,
    full_layers: FullLayers | None = None,
) -> int:
    """The most pages that a sequence of so many tokens holds at once.

    With a window: what the next token sees, and the tokens of two steps, since one is planned while another one runs.
    Neither end of these is that of a page, and decodes give pages back only when one is full. With full layers also the
    dense pages, and what is short of another one.
    """
    num_pages = -(-num_tokens // block_size)
    if window is None:
        return num_pages
    num_seen = -(-(window - 1 + 2 * max_tokens_per_step) // block_size) + 2
    if full_layers is not None:
        num_seen += num_pages // full_layers.num_blocks + full_layers.num_blocks
    return min(num_pages, num_seen)


@dataclass(frozen=True)
class GangLimits:
    """Limits of one gang and of one step."""

    max_model_len: int  # tokens
    vocab_size: int
    block_size: int  # tokens a page
    num_pages: int
    max_tokens_per_step: int
    max_num_sequences: int
    window: int | None = None  # newest tokens whose pages a sequence keeps (`kept_window`); None: all
    full_layers: FullLayers | None = None  # with a window: layers that see all tokens nevertheless; None: none does
    num_state_pages: int = 0  # that the recurrent state of a sequence takes, however long it is
    has_head: bool = True  # False: the base was saved without its head, and makes embeddings alone

    def num_unseen_pages(self, num_tokens: int) -> int:
        """The first pages of a sequence that are not needed whole any more, once so many of its tokens are computed.

        No layer sees them. With full layers: as many of those that only these see as whole dense pages hold.
        """
        num_unseen = num_unseen_pages(num_tokens, self.block_size, self.window)
        return num_unseen if self.full_layers is None else num_unseen - num_unseen % self.full_layers.num_blocks

    def most_pages(self, num_tokens: int) -> int:
        """The most pages that a sequence of so many tokens holds at once."""
        if self.window is None:
            return pages_for(num_tokens, self.block_size) + self.num_state_pages
        return most_pages(num_tokens, self.block_size, self.window, self.max_tokens_per_step, self.full_layers)

    def needed_pages(self, num_tokens: int) -> int:
        """Pages of a pool in which a sequence of so many tokens always gets on: a dense page is filled before others
        are given back for it."""
        num_pages = pages_for(num_tokens, self.block_size) + self.num_state_pages
        return min(num_pages, self.most_pages(num_tokens) + (self.full_layers is not None))


def pages_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
