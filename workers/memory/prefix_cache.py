"""Full pages of KV by their content, shared by all sequences with a common prefix."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice, takewhile

import msgspec

from ..wire.page_keys import PageKey, is_state, last_state, state_key
from .page_allocator import IdleOrder, PageAllocator, UseCount

# Finds kept pages that share their first tokens, but not all, with a sequence.

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


MOST_GIVEN_BACK = 512  # pages of ended sequences that are released in a step
_RELEASED_AT_ONCE = 64  # pages of a sequence
_OWN_HOLDERS = 2  # of a page that an ended sequence alone holds: itself, and this cache
_MOST_FOR_ROOM = 4096  # pages more in a step, where room is short, of those that others hold, too
_MOST_LOOKED_AT = 16  # ended sequences that share pages, in the search for one whose pages make room
_CLEARING_STEPS = 32  # or this part of all, if that is more: so that they are released as fast as they come


class _Entry(msgspec.Struct, gc=False):
    key: PageKey
    depth: int  # pages before it
    adapter: str | None  # digest, if known
    num_blocks: float  # whose KV it has; of each page of a state, what part of a block would have to be computed for it
    more_pages: tuple[int, ...] = ()  # pages of a state but the first, with which they come and go
    uses: UseCount = msgspec.field(default_factory=UseCount)
    is_passed: bool = (
        False  # with a window: the sequence that filled it sees it no more, nor does the end of its prompt
    )
    is_outdated: bool = False  # its adapter has no name any more: evicted first, unless a sequence uses the page again


class PrefixCache:
    """Keeps every full page that was computed, until it is evicted. A page is never written once it is here.

    A page is idle while no sequence holds it. Without a page, those after it cannot be found; so among pages of equal
    worth the deeper ones are evicted first. With a window the last ones are as much needed as those before them.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        idle: IdleOrder,
        page_cost_s: Callable[[PageKey, float], float],
        has_window: bool = False,
    ) -> None:
        """`page_cost_s`: what it costs to bring a page back, in seconds, of which computing takes as long as so many
        pages of KV. `has_window`: of layers, some or all.
        """
        self._allocator, self._idle, self._page_cost_s = allocator, idle, page_cost_s
        self._has_window = has_window
        self._pages: dict[PageKey, int] = {}
        self._entries: dict[int, _Entry] = {}  # by page
        self._of_adapters: dict[str, set[int]] = {}  # pages by digest
        self._partial_pages = PartialPageIndex()
        # Ended sequences with pages that are not released yet: these, as far as which number; the sequence.
        self._leaving: deque[tuple[Sequence[int], int, object]] = deque()
        self._sharing: deque[tuple[Sequence[int], int, object]] = deque()  # those whose last page others hold, too
        self._moved: dict[PageKey, None] = {}  # keys added or removed since the last take_changes()
        self.num_evictions = 0
        self._num_more_pages = 0  # pages of states but the first ones
        self.num_leaving = 0  # pages of ended sequences that are not released yet
        self.num_may_give_back = MOST_GIVEN_BACK  # in this step

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """Pages of the first keys, up to the first one that is not here."""
        return [*iter(map(self._pages.get, keys).__next__, None)]

    def find_partial(self, link: PageKey, token_ids: Sequence[int], block_size: int) -> tuple[int, int] | None:
        """A page after `link` with a common prefix of these tokens, and its length; None: none is worth a copy."""
        match = self._partial_pages.find(link, token_ids, block_size)
        return None if match is None else (self._pages[match[0]], match[1])

    def page_of(self, key: PageKey) -> int | None:
        return self._pages.get(key)

    def state_of(self, key: PageKey) -> tuple[int, ...] | None:
        """Pages of the recurrent state after the page with this key; None: it is not here."""
        return self.pages_of(state_key(key))

    def pages_of(self, key: PageKey) -> tuple[int, ...] | None:
        """The page with this key, or all pages of the state with it; None: it is not here."""
        page = self._pages.get(key)
        return None if page is None else (page, *self._entries[page].more_pages)

    def last_state(self, keys: Sequence[PageKey]) -> tuple[int, tuple[int, ...]]:
        """How many of the first pages with these keys come before the last recurrent state that is here, and its pages.

        (0, ()): none is here.
        """
        depth = last_state(keys, self._pages.__contains__)
        return depth, (self.state_of(keys[depth - 1]) or ()) if depth else ()

    def insert_state(
        self, pages: tuple[int, ...], key: PageKey, depth: int, num_blocks: int, adapter: str | None = None
    ) -> bool:
        """Keeps a sequence's recurrent state under its own key; `depth`: pages of KV before it.

        `num_blocks`: that would be computed again without it. False: it is here already.
        """
        if key in self._pages:
            return False
        first, *following = pages
        self._allocator.share(pages)
        self._num_more_pages += len(following)
        self._add(first, _Entry(key, depth, adapter, num_blocks / len(pages), more_pages=tuple(following)))
        return True

    def num_held(self, keys: Sequence[PageKey], start: int, stop: int, coming_keys: Container[PageKey]) -> int:
        """The first index from `start` on, at most `stop`, whose page no sequence holds and which is not coming.

        Little work for each key, since there may be thousands.
        """
        pages, idle = self._pages, self._idle.items
        for index in range(start, stop):
            key = keys[index]
            if key not in coming_keys and ((page := pages.get(key)) is None or page in idle):
                return index
        return stop

    def acquire(self, pages: Sequence[int]) -> None:
        """One more sequence holds these pages, which are here or are being copied here, until `release`."""
        for page in self._allocator.held_once(pages):  # by this cache, and idle, or by the copy
            if page in self._idle:
                self._idle.remove(page)
        self._allocator.share(pages)

    def count_uses(self, pages: Iterable[int]) -> None:
        """Counts a use of those of these pages that are here, as a sequence starts with them as its prefix."""
        entries, num_rounds = self._entries, self._idle.num_rounds
        for page in pages:
            entry = entries.get(page)
            if entry is None:
                continue
            entry.uses.add(num_rounds)
            if entry.is_outdated:
                entry.is_outdated = False

    def mark_passed(self, pages: Iterable[int]) -> None:
        """With a window: these pages are evicted first, unless other sequences have found them or do so later."""
        for page in pages:
            if (entry := self._entries.get(page)) is not None:
                entry.is_passed = True

    def outdate(self, adapter: str) -> None:
        """The adapter has no name any more: its idle pages are evicted first, until a sequence uses them again."""
        for page in self._of_adapters.get(adapter, ()):
            self._entries[page].is_outdated = True
            if page in self._idle:
                self._idle.remove(page)
                self._make_idle(page)

    def insert(self, page: int, key: PageKey, depth: int, adapter: str | None = None, num_blocks: int = 1) -> bool:
        """Keeps a page that a sequence has filled; `depth`: pages before it. False: its content is here already.

        `adapter`: digest with which it was computed, if known. `num_blocks`: pages that would be computed to fill it.
        """
        if key in self._pages:
            return False
        self._allocator.share((page,))
        self._add(page, _Entry(key, depth, adapter, num_blocks))
        self._moved[key] = None
        return True

    def _add(self, page: int, entry: _Entry) -> None:
        assert page not in self._entries, f"page {page} has a key already"
        self._pages[entry.key], self._entries[page] = page, entry
        entry.uses.add(self._idle.num_rounds)
        if entry.adapter is not None:
            self._of_adapters.setdefault(entry.adapter, set()).add(page)

    def index_content(self, key: PageKey, link: PageKey, token_ids: Sequence[int]) -> None:
        """Indexes the tokens of a page, which follows `link`, for `find_partial`."""
        if key in self._pages:
            self._partial_pages.add(key, link, token_ids)

    def release(self, pages: Sequence[int]) -> None:
        """Ends a sequence's hold on pages. Kept pages without other holders become idle, pages not kept free."""
        self._allocator.release(pages)
        for page in self._allocator.held_once(pages):
            if page in self._entries:
                self._make_idle(page)

    def release_later(self, pages: Sequence[int], owner: object) -> None:
        """As `release`, at once or in later steps, so that the end of long sequences does not make a step long.

        `owner`: the sequence, which is kept as long as its pages, since freeing thousands of tokens takes long too.
        """
        if pages:
            self._leaving.append((pages, len(pages), owner))
            self.num_leaving += len(pages)
            self.give_back(self.num_may_give_back)

    def begin_step(self) -> None:
        """Releases pages of ended sequences: about MOST_GIVEN_BACK until the next call, unless room is short.

        Short answers on a long document that they share hold far more pages in a step than it computes.
        """
        self.num_may_give_back = max(MOST_GIVEN_BACK, self.num_leaving // _CLEARING_STEPS)
        self.give_back(self.num_may_give_back)

    def give_back(self, num_pages: int) -> None:
        """Releases at most `num_pages` pages of ended sequences, those of the first ones first.

        Of a sequence its last pages go first, and those that others hold, too, when no other is left: they make no
        room. And what is idle sooner is evicted sooner, and without the first pages of a prefix none of the others is
        found.
        """
        while num_pages > 0 and (self._leaving or self._sharing):
            leaving = self._leaving or self._sharing
            pages, stop, owner = leaving.popleft()
            if leaving is self._leaving and self._allocator.num_holders(pages[stop - 1]) > _OWN_HOLDERS:
                self._sharing.append((pages, stop, owner))
                continue
            start = max(0, stop - min(num_pages, _RELEASED_AT_ONCE))
            if start:
                leaving.appendleft((pages, start, owner))
            num_pages -= stop - start
            self.num_leaving -= stop - start
            self.num_may_give_back -= stop - start
            self.release(pages[start:stop])

    def give_back_for_room(self, max_pages: int) -> bool:
        """Releases pages of ended sequences because room is short. False: none is left that may be released now.

        Pages that others hold, too, seldom make room, and there may be a hundred times as many as the pool has.
        """
        if not self._leaving and (self.num_may_give_back < -_MOST_FOR_ROOM or not self._may_make_room()):
            return False
        self.give_back(max_pages)
        return True

    def _may_make_room(self) -> bool:
        """Whether none but ended sequences share the pages that are released next; looks for such ones first."""
        for _ in range(min(len(self._sharing), _MOST_LOOKED_AT)):
            pages, stop, _ = self._sharing[0]
            if self._allocator.num_holders(pages[stop - 1]) <= 1 + len(self._sharing):  # this cache, and all of these
                return True
            self._sharing.rotate(-1)
        return False

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Drops pages whose numbers are not finite, so no other sequence finds them. Their holders keep them."""
        for key in keys:
            page = self._pages.get(key)
            if page is not None:
                if page in self._idle:
                    self._idle.remove(page)
                self._drop(page)

    def forget_unused(self, key: PageKey) -> None:
        """Drops what has this key, unless a sequence holds it or has found it."""
        page = self._pages.get(key)
        if page is not None and page in self._idle and self._entries[page].uses.value <= 1.0:
            self._idle.remove(page)
            self._drop(page)

    def evict(self, page: int) -> None:
        """Frees an idle page that the idle order has chosen."""
        self._drop(page)
        self.num_evictions += 1

    def take_changes(self) -> tuple[list[PageKey], list[PageKey]]:
        """Keys added, and keys removed, since the last call."""
        moved, self._moved = self._moved, {}
        return [key for key in moved if key in self._pages], [key for key in moved if key not in self._pages]

    @property
    def num_pages(self) -> int:
        return len(self._entries) + self._num_more_pages

    def holders(self) -> Iterator[tuple[int, ...]]:
        """All pages, for integrity checks."""
        yield tuple(self._entries)
        yield from (entry.more_pages for entry in self._entries.values() if entry.more_pages)

    def ended_holders(self) -> Iterator[Sequence[int]]:
        """Pages of ended sequences that are not released yet, for integrity checks."""
        return (pages[:stop] for pages, stop, _ in (*self._leaving, *self._sharing))

    def check_integrity(self) -> None:
        """Raises AssertionError if keys and pages do not match, or an idle page is not known as idle."""
        assert self._pages == {entry.key: page for page, entry in self._entries.items()}, "keys and pages differ"
        assert self._partial_pages.keys() <= self._pages.keys(), "an absent page is indexed"
        of_adapters = {(entry.adapter, page) for page, entry in self._entries.items() if entry.adapter is not None}
        by_adapter = {(adapter, page) for adapter, pages in self._of_adapters.items() for page in pages}
        assert by_adapter == of_adapters, "an adapter's pages are not known as such"
        assert self.num_leaving == sum(map(len, self.ended_holders())), "pages of ended sequences are miscounted"
        assert self._num_more_pages == sum(len(entry.more_pages) for entry in self._entries.values())
        for page in self._entries:
            assert (page in self._idle) == (self._allocator.num_holders(page) == 1), f"page {page}: idle or not?"

    def _make_idle(self, page: int) -> None:
        entry = self._entries[page]
        num_uses = 0.0 if entry.is_outdated else entry.uses.value - entry.is_passed
        depth = 0 if self._has_window else entry.depth
        self._idle.add(page, 1 + len(entry.more_pages), num_uses, self._page_cost_s(entry.key, entry.num_blocks), depth)

    def _drop(self, page: int) -> None:
        entry = self._entries.pop(page)
        key = entry.key
        del self._pages[key]
        if entry.adapter is not None:
            pages = self._of_adapters[entry.adapter]
            pages.remove(page)
            if not pages:
                del self._of_adapters[entry.adapter]
        self._partial_pages.remove(key)
        if not is_state(key):
            self._moved[key] = None
        self._num_more_pages -= len(entry.more_pages)
        self._allocator.release((page, *entry.more_pages))
