"""How sequences find, wait for and leave behind the pages that they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Pages
from itertools import takewhile

from ..memory.prefix_cache import PrefixCache
from ..page_keys import PageKey, first_link, next_keys
from .sequence import Sequence
from .tier_traffic import TierTraffic


class PrefixReuse:
    """The scheduler's dealings with the prefix cache: it says when, and this knows which pages.

    Sequences that begin alike and come together, as `n` samples of one prompt do, are not computed side by side: the
    first one computes the pages, and the others wait until they are there.
    """

    def __init__(self, cache: PrefixCache, tiers: TierTraffic, block_size: int, enabled: bool) -> None:
        self._cache, self._tiers, self._block_size, self._enabled = cache, tiers, block_size, enabled
        # Full pages that running sequences are about to compute, or (None) that are being copied into the pool.
        self._coming: dict[PageKey, Sequence | None] = {}
        self.num_cached_tokens = 0  # that were found, and not computed, since the start

    def find(self, sequence: Sequence, keep: set[str]) -> list[int] | None:
        """Pages of its beginning that are here; None: the next ones are coming, so that waiting is cheaper.

        What is in a tier behind the pool begins to come; `keep`: adapters that do not go to make room for it. One token
        at least is left to compute, since the next one is chosen by what comes of it.
        """
        if not self._enabled:
            return []
        if sequence.awaited_key in self._coming:
            return None
        num_usable = (len(sequence.token_ids) - 1) // self._block_size
        self._make_keys(sequence, len(sequence.token_ids) // self._block_size)
        keys = sequence.page_keys[:num_usable]
        found = self._cache.find(keys)
        sequence.num_found = len(found) * self._block_size
        sequence.awaited_key = keys[len(found)] if len(found) < num_usable else None
        if sequence.awaited_key is None:
            return found
        if sequence.awaited_key not in self._coming:
            absent = list(takewhile(self._is_absent, keys[len(found) :]))
            self._coming |= dict.fromkeys(self._tiers.bring(found, absent, keep))
        return None if sequence.awaited_key in self._coming else found

    def is_being_copied(self, sequence: Sequence) -> bool:
        """What it awaits comes from a tier behind the pool."""
        return sequence.awaited_key is not None and self._coming.get(sequence.awaited_key, sequence) is None

    def stop_awaiting(self, keys: Iterable[PageKey]) -> None:
        """These were being copied into the pool, and are there now, or will not come."""
        for key in keys:
            if self._coming.get(key, self) is None:
                del self._coming[key]

    def enter(self, sequence: Sequence, found: Pages[int]) -> None:
        """The sequence runs now, and holds these pages already."""
        sequence.pages.extend(found)
        sequence.num_kept_pages = len(found)
        sequence.num_computed = len(found) * self._block_size
        self.num_cached_tokens += sequence.num_computed
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        self._cache.count_uses(found)
        self._tiers.touch(sequence.page_keys[: len(found)])
        for key in sequence.page_keys[len(found) :]:
            self._coming.setdefault(key, sequence)

    def keep_filled(self, sequence: Sequence) -> None:
        """Keeps the pages that the sequence has filled by now."""
        if not self._enabled:
            return
        num_full = sequence.num_computed // self._block_size
        if num_full == sequence.num_kept_pages:
            return
        self._make_keys(sequence, num_full)
        for depth in range(sequence.num_kept_pages, num_full):
            key = sequence.page_keys[depth]
            if self._cache.insert(sequence.pages[depth], key, depth):
                self._tiers.offer(sequence.pages[depth], key)
            self._stop_coming(sequence, key)
        sequence.num_kept_pages = num_full

    def leave(self, sequence: Sequence) -> None:
        """The sequence does not run any more: it lets go of its pages."""
        for key in sequence.page_keys[sequence.num_kept_pages :]:
            self._stop_coming(sequence, key)
        self._cache.release(sequence.pages)
        sequence.pages.clear()
        sequence.num_computed = sequence.num_kept_pages = sequence.num_found = 0

    def disown(self, sequence: Sequence) -> None:
        """Nobody may find what this one computed, in any tier: it came to no good."""
        if self._enabled:
            num_full = sequence.num_computed // self._block_size
            self._make_keys(sequence, num_full)
            keys = sequence.page_keys[:num_full]
            self._cache.forget(keys)
            self._tiers.forget(keys)

    def check_integrity(self, running: Pages[Sequence]) -> None:
        """Raises AssertionError if a page is awaited that nobody computes."""
        computing = {id(sequence) for sequence in self._coming.values() if sequence is not None}
        assert computing <= {id(sequence) for sequence in running}
        assert self._tiers.num_moves or None not in self._coming.values()

    def _is_absent(self, key: PageKey) -> bool:
        """Neither here nor coming."""
        return self._cache.page_of(key) is None and key not in self._coming

    def _make_keys(self, sequence: Sequence, num_keys: int) -> None:
        keys = sequence.page_keys
        if len(keys) < num_keys:
            link = keys[-1] if keys else first_link(sequence.request)
            start = len(keys) * self._block_size
            keys += next_keys(link, sequence.token_ids, start, self._block_size, num_keys - len(keys))

    def _stop_coming(self, sequence: Sequence, key: PageKey) -> None:
        if self._coming.get(key) is sequence:
            del self._coming[key]
