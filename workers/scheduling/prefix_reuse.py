"""How sequences find, await and leave behind the pages that they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Pages
from collections.abc import Set as AbstractSet
from itertools import islice, takewhile
from weakref import WeakValueDictionary

from ..memory.idle_order import Item
from ..memory.prefix_cache import PrefixCache
from ..plan import PageCopy
from ..wire.page_keys import PageKey, first_link, next_keys
from .sequence import Sequence
from .tier_traffic import TierTraffic
from .waiting_queue import WaitingQueue

# How many of their first pages are in other hands, of sequences that were asked about: by the first page's key, how
# many of the last such sequence, and the key of the last of these. Who begins with them need not be asked again.
Hands = dict[PageKey, tuple[int, PageKey]]


class PrefixReuse:
    """Uses the prefix cache for the scheduler's sequences: the scheduler says when, and this class knows which pages.

    Sequences that begin alike and come together, as `n` samples of one prompt do, are not computed side by side: the
    first one computes the pages, and the others wait until these are there.
    """

    def __init__(
        self, cache: PrefixCache, tiers: TierTraffic, waiting: WaitingQueue, block_size: int, enabled: bool
    ) -> None:
        """`waiting` hears of pages that its sequences need not await any more."""
        self._cache, self._tiers, self._waiting = cache, tiers, waiting
        self._block_size, self._enabled = block_size, enabled
        self._alike: WeakValueDictionary[PageKey, Sequence] = WeakValueDictionary()  # the last, by its first page's key
        # Full pages that running sequences are about to compute, or (None) that are being copied into the pool.
        self._coming: dict[PageKey, Sequence | None] = {}
        self._copies: list[PageCopy] = []  # for the next plan
        self._copied_from: list[int] = []  # pages that stay as they are until the plan's end
        self.num_cached_tokens = 0  # tokens that were found and not computed, since the start

    def prepare(self, sequence: Sequence) -> None:
        """Makes the keys of a sequence that arrives: those that an earlier one has too are taken from there."""
        num_keys = len(sequence.token_ids) // self._block_size
        if not self._enabled or not num_keys:
            return
        self._make_keys(sequence, 1)
        first = sequence.page_keys[0]
        if (alike := self._alike.get(first)) is not None:
            most = min(num_keys, len(alike.page_keys))
            num_alike = _num_alike_pages(sequence.token_ids, alike.token_ids, most, self._block_size)
            sequence.page_keys = alike.page_keys[:num_alike]
        self._make_keys(sequence, num_keys)
        self._alike[first] = sequence

    def find(self, sequence: Sequence, keep: AbstractSet[Item]) -> list[int] | None:
        """Pages of the sequence's prefix that are in the pool; None: the next ones are coming, and are worth a wait.

        Pages in a tier behind the pool begin to come; nothing in `keep` is evicted to make room for them. At least one
        token is left to compute, since its logits choose the next one.
        """
        if not self._enabled:
            return []
        if sequence.awaited_key in self._coming:
            if self._lacks_copies(sequence):
                self._bring_more(sequence, keep)
            return None
        keys = self._usable_keys(sequence)
        found = self._cache.find(keys)
        sequence.was_looked_up = True
        self._waiting.tell_found(sequence, len(found) * self._block_size)
        sequence.awaited_key = keys[len(found)] if len(found) < len(keys) else None
        if sequence.awaited_key is None:
            return found
        if sequence.awaited_key not in self._coming:
            self._bring(sequence, found, keys, keep)
        return None if sequence.awaited_key in self._coming else found

    def is_known(self, sequence: Sequence) -> bool:
        """What the last look-up of its prefix found still holds, as far as a glance can tell."""
        key = sequence.awaited_key
        if not sequence.was_looked_up:
            return not self._enabled
        return key is None or (key not in self._coming and self._cache.page_of(key) is None)

    def key_to_await(self, sequence: Sequence) -> PageKey:
        """Of a sequence for which `find` has found None: the key of the last page that is coming for it."""
        keys, depth = sequence.page_keys, sequence.num_found // self._block_size
        last = self._num_usable(sequence) - 1
        while depth < last and keys[depth + 1] in self._coming:
            depth += 1
        return keys[depth]

    def last_coming(self, sequence: Sequence, hands: Hands) -> PageKey | None:
        """The key of the last page that is coming for it, if all pages before are here and held, or are coming too."""
        num_pages = self.num_in_other_hands(sequence, hands)
        key = sequence.page_keys[num_pages - 1] if num_pages else None
        return key if key in self._coming else None

    @property
    def can_come_ahead(self) -> bool:
        """Pages may come into the pool from a tier behind it."""
        return self._enabled and self._tiers.can_bring()

    def may_come_ahead(self, sequence: Sequence, hands: Hands) -> bool:
        """Whether `find` could let more pages come for a sequence that cannot start yet.

        The prefix is looked up once, and again whenever the pages that came for it are there with all before them;
        while they come, more may follow. So no page comes twice while the sequence waits, though other pages may push
        it out: `find` brings it again when there is a place for the sequence.
        """
        if not sequence.was_looked_up:
            return self.can_come_ahead
        key, num_found = sequence.awaited_key, sequence.num_found // self._block_size
        if key in self._coming:  # as of all that wait for one document but the first
            return self._lacks_copies(sequence)
        if key is None or self._cache.page_of(key) is None or not self.can_come_ahead:
            return False
        held = self.num_in_other_hands(sequence, hands)
        return held > num_found or len(self._cache.find(sequence.page_keys[held : num_found + 1])) > num_found - held

    def here(self, sequence: Sequence, hands: Hands) -> list[int]:
        """Pages of its prefix that are in the pool, and nobody's, if it was looked up since it began to wait."""
        if not sequence.was_looked_up:
            return []
        return self._cache.find(sequence.page_keys[self.num_in_other_hands(sequence, hands) :])

    def num_in_other_hands(self, sequence: Sequence, hands: Hands) -> int:
        """Pages of its prefix that take no room when it starts: others hold or compute them, or they are coming.

        `hands`: what was learnt of others; good for as long as no page is released.
        """
        most = self._num_usable(sequence) if self._enabled else 0
        if not most:
            return 0
        self._make_keys(sequence, most)
        keys = sequence.page_keys
        num_held, last = hands.get(keys[0], (0, b""))
        if num_held > most or keys[num_held - 1] != last:
            num_held = 0
        while num_held < most and (keys[num_held] in self._coming or self._cache.is_held(keys[num_held])):
            num_held += 1
        if num_held:
            hands[keys[0]] = (num_held, keys[num_held - 1])
        return num_held

    def is_being_copied(self, key: PageKey) -> bool:
        """The page is coming from a tier behind the pool."""
        return self._coming.get(key, self) is None

    def stop_awaiting(self, keys: Iterable[PageKey]) -> None:
        """Pages with these keys were being copied into the pool; they are there now, or will not come."""
        for key in keys:
            if self._coming.get(key, self) is None:
                del self._coming[key]
                self._waiting.page_came(key)

    def enter(self, sequence: Sequence, found: Pages[int], own: Pages[int]) -> None:
        """The sequence starts. It holds the pages `found` of its prefix, and its `own` for what it has to compute.

        Its first own page begins as a copy if a kept page has its first tokens in common with the sequence.
        """
        sequence.hold((*found, *own))
        sequence.num_kept_pages = len(found)
        sequence.num_computed = len(found) * self._block_size + self._copy_begun(sequence, found)
        self.num_cached_tokens += sequence.num_computed
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        self._cache.count_uses(found)
        self._tiers.touch(sequence.page_keys[: len(found)])
        for key in sequence.page_keys[len(found) :]:
            self._coming.setdefault(key, sequence)

    def take_copies(self) -> tuple[PageCopy, ...]:
        """What the next plan should copy within the pool. `end_copies` must follow it."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def end_copies(self, copies: Iterable[PageCopy]) -> None:
        """The copies of a plan are made."""
        for copy in copies:
            self._copied_from.remove(copy.source)
            self._cache.release((copy.source,))

    def holders(self) -> Iterable[tuple[int]]:
        """Pages that copies hold, for integrity checks."""
        return ((page,) for page in self._copied_from)

    def keep_filled(self, sequence: Sequence) -> None:
        """Puts the pages that the sequence has filled by now into the prefix cache."""
        if not self._enabled:
            return
        num_full = sequence.num_computed // self._block_size
        if num_full == sequence.num_kept_pages:
            return
        self._make_keys(sequence, num_full)
        for depth in range(sequence.num_kept_pages, num_full):
            key = sequence.page_keys[depth]
            if self._cache.insert(sequence.pages[depth], key, depth, sequence.adapter_digest):
                self._tiers.offer(sequence.pages[depth], key)
                start = depth * self._block_size
                token_ids = sequence.token_ids[start : start + self._block_size]
                self._cache.tell_content(key, self._link(sequence, depth), token_ids)
            self._stop_coming(sequence, key)
        sequence.num_kept_pages = num_full

    def leave(self, sequence: Sequence) -> None:
        """The sequence does not run any more: releases its pages."""
        for key in sequence.page_keys[sequence.num_kept_pages :]:
            self._stop_coming(sequence, key)
        self._cache.release(sequence.pages)
        sequence.hold(())
        sequence.num_computed = sequence.num_kept_pages = sequence.num_found = 0
        sequence.was_looked_up = sequence.is_told = False
        sequence.awaited_key = sequence.num_brought = None

    def disown(self, sequence: Sequence) -> None:
        """Forgets what the sequence has computed, in all tiers: its numbers are not finite, so nobody may use them."""
        if self._enabled:
            num_full = sequence.num_computed // self._block_size
            self._make_keys(sequence, num_full)
            keys = sequence.page_keys[:num_full]
            self._cache.forget(keys)
            self._tiers.forget(keys)

    def check_integrity(self, running: Pages[Sequence]) -> None:
        """Raises AssertionError if a page is awaited that no sequence computes and no copy brings."""
        computing = {id(sequence) for sequence in self._coming.values() if sequence is not None}
        assert computing <= {id(sequence) for sequence in running}
        assert self._tiers.num_moves or None not in self._coming.values()
        assert self._waiting.awaited_keys() <= self._coming.keys(), "a page is awaited that is not coming"

    def _usable_keys(self, sequence: Sequence) -> list[PageKey]:
        """Keys of the full pages that the sequence need not compute if they are there."""
        self._make_keys(sequence, len(sequence.token_ids) // self._block_size)
        return sequence.page_keys[: self._num_usable(sequence)]

    def _num_usable(self, sequence: Sequence) -> int:
        return (len(sequence.token_ids) - 1) // self._block_size

    def _lacks_copies(self, sequence: Sequence) -> bool:
        """Pages are being copied for the sequence, more of its prefix may be in a tier, and may begin to come."""
        num_brought = sequence.num_brought
        return num_brought is not None and num_brought < self._num_usable(sequence) and self._tiers.can_bring()

    def _bring_more(self, sequence: Sequence, keep: AbstractSet[Item]) -> None:
        """Lets pages come that follow on those that are coming for the sequence."""
        keys = self._usable_keys(sequence)
        before = [self._page_here_or_coming(key) for key in keys[: sequence.num_brought]]
        known = [page for page in before if page is not None]
        if len(known) == len(before):
            self._bring(sequence, known, keys, keep)
        else:  # one of them went: what is left is looked up again when the awaited page is there
            sequence.num_brought = None

    def _bring(self, sequence: Sequence, before: Pages[int], keys: Pages[PageKey], keep: AbstractSet[Item]) -> None:
        """Lets pages of these keys come, as many as may, after those `before` them."""
        absent = takewhile(self._is_absent, islice(keys, len(before), None))
        coming = self._tiers.bring(before, absent, keep)
        self._coming |= dict.fromkeys(coming)
        sequence.num_brought = len(before) + len(coming) if coming else None

    def _page_here_or_coming(self, key: PageKey) -> int | None:
        page = self._cache.page_of(key)
        return self._tiers.page_coming(key) if page is None else page

    def _is_absent(self, key: PageKey) -> bool:
        """The page is neither in the pool nor coming."""
        return self._cache.page_of(key) is None and key not in self._coming

    def _copy_begun(self, sequence: Sequence, found: Pages[int]) -> int:
        """How many tokens after the pages `found` need not be computed, because the plan copies a page with them."""
        start = len(found) * self._block_size
        left = sequence.token_ids[start : start + self._block_size]
        if len(left) == len(sequence.token_ids) - start:
            left = left[:-1]  # the last one is computed, since its logits choose the next token
        if not self._enabled or not left:
            return 0
        begun = self._cache.find_begun(self._link(sequence, len(found)), left, self._block_size)
        if begun is None:
            return 0
        page, num_tokens = begun
        self._cache.acquire((page,))
        self._cache.count_uses((page,))
        self._copied_from.append(page)
        self._copies.append(PageCopy(page, sequence.pages[len(found)]))
        return num_tokens

    @staticmethod
    def _link(sequence: Sequence, depth: int) -> PageKey:
        """The key before the page at this depth."""
        return sequence.page_keys[depth - 1] if depth else first_link(sequence.request)

    def _make_keys(self, sequence: Sequence, num_keys: int) -> None:
        keys = sequence.page_keys
        if len(keys) < num_keys:
            link = keys[-1] if keys else first_link(sequence.request)
            start = len(keys) * self._block_size
            keys += next_keys(link, sequence.token_ids, start, self._block_size, num_keys - len(keys))

    def _stop_coming(self, sequence: Sequence, key: PageKey) -> None:
        if self._coming.get(key) is sequence:
            del self._coming[key]
            self._waiting.page_came(key)


def _num_alike_pages(first: Pages[int], second: Pages[int], most: int, block_size: int) -> int:
    """How many pages two sequences begin with in common, of which the first is; `most`: at most so many."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * block_size, middle * block_size)
        low, high = (middle, high) if first[part] == second[part] else (low, middle - 1)
    return low
