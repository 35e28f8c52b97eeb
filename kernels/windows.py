"""What rows of a layer see of their sequences, where that is not all. Needs no torch."""

from __future__ import annotations


class AttentionChunk(int):
    """A number of tokens in place of a window: a row sees those of its own chunk up to itself (Llama 4).

    Chunks follow each other from position 0 on. No row sees more than a window of as many tokens would show it.
    """

    def reach(self, position: int) -> int:
        """Tokens that a row at this position sees, itself included."""
        return position % self + 1


def reach_of(window: int, position: int) -> int:
    """Newest tokens that a row at this position sees, itself included."""
    return window.reach(position) if isinstance(window, AttentionChunk) else window


def as_number(window: int | None) -> int:
    """As kernels take it: 0 is none, below 0 is a chunk."""
    return -window if isinstance(window, AttentionChunk) else window or 0


def window_kind(window: int | None) -> int:
    """0: none, 1: a window, 2: chunks."""
    return 2 if isinstance(window, AttentionChunk) else int(window is not None)
