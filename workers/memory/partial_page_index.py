"""Finds kept pages that share their first tokens, but not all, with a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from ..wire.page_keys import PageKey

_MAX_LOOKED_AT = 32  # pages with the same first tokens, the newest ones
_Prefix = tuple[PageKey, tuple[int, ...]]  # the key before a page, and its first tokens


def min_common_tokens(block_size: int) -> int:
    """The least number of common tokens that make a copy worth its cost."""
    return max(block_size // 4, 1)


class PartialPageIndex:
    """Pages by the key before them and their first tokens."""

    def __init__(self) -> None:
        self._prefixes: dict[PageKey, _Prefix] = {}  # by the page's own key
        self._pages: dict[_Prefix, dict[PageKey, tuple[int, ...]]] = {}  # by key: all tokens of the page

    def add(self, key: PageKey, link: PageKey, token_ids: Sequence[int]) -> None:
        """Adds a full page that follows `link`."""
        prefix = (link, tuple(token_ids[: min_common_tokens(len(token_ids))]))
        self._prefixes[key] = prefix
        self._pages.setdefault(prefix, {})[key] = tuple(token_ids)

    def remove(self, key: PageKey) -> None:
        """No-op for a page that was not added."""
        prefix = self._prefixes.pop(key, None)
        if prefix is not None:
            del self._pages[prefix][key]
            if not self._pages[prefix]:
                del self._pages[prefix]

    def find(self, link: PageKey, token_ids: Sequence[int], block_size: int) -> tuple[PageKey, int] | None:
        """The page after `link` with the longest common prefix, and its length; None: all are too short."""
        pages = self._pages.get((link, tuple(token_ids[: min_common_tokens(block_size)])), {})
        counts = {key: common_prefix_len(pages[key], token_ids) for key in islice(reversed(pages), _MAX_LOOKED_AT)}
        best = max(counts, key=counts.__getitem__, default=None)
        return None if best is None else (best, counts[best])

    def keys(self) -> set[PageKey]:
        """For integrity checks."""
        assert {key: prefix for prefix, pages in self._pages.items() for key in pages} == self._prefixes
        return set(self._prefixes)


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
