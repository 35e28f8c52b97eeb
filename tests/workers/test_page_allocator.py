"""Each page is free or has one holder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.workers.memory.page_allocator import PageAllocator


@given(st.lists(st.integers(-5, 8), max_size=60))
def test_random_use_leaves_every_page_accounted_for(steps: list[int]) -> None:
    """A positive number allocates as many pages; any other number releases a holder."""
    allocator, held = PageAllocator(20), []
    for step in steps:
        if step > 0:
            free = allocator.num_free
            pages = allocator.allocate(step)
            assert (pages is None) == (step > free)
            held += [pages] if pages else []
        elif held:
            allocator.release(held.pop(-step % len(held)))
        allocator.check_integrity(held)
    assert allocator.num_free == 20 - sum(map(len, held))


def test_integrity_check_notices_leaks_and_double_use() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    assert pages
    with pytest.raises(AssertionError, match="neither held nor free"):
        allocator.check_integrity([])
    with pytest.raises(AssertionError, match="miscounted"):
        allocator.check_integrity([pages, pages])
    allocator.release(pages)
    with pytest.raises(AssertionError, match="both held and free"):
        allocator.check_integrity([pages])
    with pytest.raises(AssertionError, match="was not held"):
        allocator.release(pages)
