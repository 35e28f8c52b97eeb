"""Masks of the tokens that a row may choose, and the source from which a worker gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from ..plan import SampledToken, StepPlan

TokenMask = bytes  # a bit for each token of the vocabulary, the lowest first, in whole int32 words: 1 may be chosen


class MaskSource(Protocol):
    """Makes masks beside the forward pass. Used from one thread, plan by plan."""

    def follow(self, plan: StepPlan, fed: Mapping[int, SampledToken | None]) -> None:
        """Begins to make the masks of the plan's sequences with a grammar: their last tokens are known now.

        `fed`: by sequence id, the tokens of the step before, which the plan computes.
        """

    def take(self, positions: Sequence[tuple[int, int]], is_over: Callable[[], bool]) -> Mapping[int, TokenMask]:
        """Masks by sequence id, for the tokens with these (sequence id, index of the token).

        Waits for them until `is_over`; masks that are late then are left out.
        """


class NoMasks:
    """The source of a worker whose sequences have no grammars."""

    def follow(self, plan: StepPlan, fed: Mapping[int, SampledToken | None]) -> None: ...

    def take(self, positions: Sequence[tuple[int, int]], is_over: Callable[[], bool]) -> Mapping[int, TokenMask]:
        return {}


@lru_cache(maxsize=256)
def mask_of(token_ids: tuple[int, ...], vocab_size: int) -> TokenMask:
    """A mask of these tokens alone."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[[*token_ids]] = 1
    return np.packbits(bits, bitorder="little").tobytes()
