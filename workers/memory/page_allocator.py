"""Which pages of the pool are free, and how many hold each of the others. One allocator for KV and adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PageAllocator:
    """Hands out page ids. Lives with the gang's leader; ids are the same on every worker."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: pages freed last are warm in cache
        self._num_holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> tuple[int, ...] | None:
        """That many pages, each with one holder, or None (and nothing taken) if fewer are free."""
        if num_pages > len(self._free):
            return None
        if not num_pages:
            return ()
        pages = tuple(self._free[: -num_pages - 1 : -1])
        del self._free[-num_pages:]
        num_holders = self._num_holders
        for page in pages:
            num_holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are held already."""
        num_holders = self._num_holders
        for page in pages:
            assert num_holders[page], f"page {page} is shared, and was not held"
            num_holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes a holder; pages without a holder are free."""
        num_holders, free = self._num_holders, self._free
        for page in pages:
            assert num_holders[page], f"page {page} is released, and was not held"
            num_holders[page] -= 1
            if not num_holders[page]:
                free.append(page)

    def held_once(self, pages: Iterable[int]) -> list[int]:
        """Those of the pages that have one holder."""
        num_holders = self._num_holders
        return [page for page in pages if num_holders[page] == 1]

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless every page is free, or is held by as many holders as were counted."""
        refs: Counter[int] = Counter()
        for pages in map(list, holders):
            assert len(pages) == len(set(pages)), "a holder has a page twice"
            refs.update(pages)
        assert len(self._free) == len(set(self._free)), "a page is free twice"
        assert not refs.keys() & set(self._free), "a page is both held and free"
        assert len(refs) + len(self._free) == self.num_pages, "a page is neither held nor free"
        assert all(self._num_holders[page] == count for page, count in refs.items()), "a page's holders are miscounted"
        assert not any(self._num_holders[page] for page in self._free), "a free page has holders"
