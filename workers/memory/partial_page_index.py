"""Kept pages by the tokens that they begin with, for sequences that have only a part of a page in common with one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from ..wire.page_keys import PageKey

_MAX_LOOKED_AT = 32  # of pages that begin alike, the newest ones
_Place = tuple[PageKey, tuple[int, ...]]  # the key before a page, and its first tokens


def min_common_tokens(block_size: int) -> int:
    """How many tokens a page must have in common with a sequence to be worth a copy."""
    return max(block_size // 4, 1)


class PartialPageIndex:
    """Knows which pages come after a key, and which tokens they hold."""

    def __init__(self) -> None:
        self._places: dict[PageKey, _Place] = {}  # by the page's own key
        self._pages: dict[_Place, dict[PageKey, tuple[int, ...]]] = {}  # with all of their tokens

    def add(self, key: PageKey, link: PageKey, token_ids: Sequence[int]) -> None:
        """A full page that comes after `link`."""
        place = (link, tuple(token_ids[: min_common_tokens(len(token_ids))]))
        self._places[key] = place
        self._pages.setdefault(place, {})[key] = tuple(token_ids)

    def remove(self, key: PageKey) -> None:
        """No-op for a page that was not added."""
        place = self._places.pop(key, None)
        if place is not None:
            del self._pages[place][key]
            if not self._pages[place]:
                del self._pages[place]

    def find(self, link: PageKey, token_ids: Sequence[int], block_size: int) -> tuple[PageKey, int] | None:
        """The page after `link` that begins with most of these tokens, and how many of them; None: with too few."""
        pages = self._pages.get((link, tuple(token_ids[: min_common_tokens(block_size)])), {})
        counts = {key: _common_prefix_len(pages[key], token_ids) for key in islice(reversed(pages), _MAX_LOOKED_AT)}
        best = max(counts, key=counts.__getitem__, default=None)
        return None if best is None else (best, counts[best])

    def keys(self) -> set[PageKey]:
        """For integrity checks."""
        assert {key: place for place, pages in self._pages.items() for key in pages} == self._places
        return set(self._places)


def _common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
