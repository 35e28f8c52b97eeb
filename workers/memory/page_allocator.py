"""Which pages of the pool are free, and who holds the others. One allocator for KV and adapters."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Hands out page ids. Lives with the gang's leader; ids are the same on every worker."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: pages freed last are warm in cache
        self._held = bytearray(num_pages)  # 1: handed out

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...] | None:
        """That many pages, or None (and nothing taken) if so many are not free."""
        if num_pages > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(num_pages))
        for page in pages:
            self._held[page] = 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Takes back pages that were handed out."""
        for page in pages:
            assert self._held[page], f"page {page} is released, and was not held"
            self._held[page] = 0
            self._free.append(page)

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless every page is either free or in exactly one holder's hands."""
        held = [page for pages in holders for page in pages]
        assert len(held) == len(set(held)), "a page is in two hands"
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert not set(held) & set(self._free), "a page is both held and free"
        assert len(held) + len(self._free) == self.num_pages, "a page is neither held nor free"
        assert all(self._held[page] for page in held), "a held page counts as free"
