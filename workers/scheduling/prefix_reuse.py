"""How sequences share the pages of common prefixes: look-up, waiting for pages, and keeping filled ones."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import islice, repeat, takewhile
from weakref import WeakValueDictionary

from ..fairness.prompt_budget import PrefixHere
from ..memory.page_allocator import Item
from ..memory.prefix_cache import PrefixCache, common_prefix_len, min_common_tokens
from ..plan import FullLayersCopy, PageCopy
from ..window_pages import GangLimits, pages_for
from ..wire.page_keys import PageKey, dense_key, last_state, state_key
from .growing_sequence import GrowingSequence, StateSnapshot
from .tier_traffic import TierTraffic
from .waiting_queue import WaitingQueue

MOST_KEYS = 1024  # made in a step for sequences that arrive and wait, while others run
_ANSWER_PAGES = 8  # of KV between snapshots of an answer, at least
_KEYS_OF_A_COPY = 128  # that could be made in the time in which those of a common prefix are found and copied
# Memo of `num_held_by_others`: by the key of the first page, the number of pages that the last sequence with this page
# found held, and the key of the last of them. Another sequence with the same key there need not check these again.
HeldByOthers = dict[PageKey, tuple[int, PageKey]]


@dataclass(frozen=True)
class FoundPrefix:
    """The first `num_pages` pages of a sequence. The last of them, those that the token after them sees, are here."""

    num_pages: int = 0
    pages: Sequence[int] = ()  # the last ones, in the pool
    dense_pages: Sequence[int] = ()  # in the pool, for those before them
    state_pages: Sequence[int] = ()  # with the recurrent state after them, where the base has one
    num_kv_pages: int = 0  # in the pool or behind it, of which the last ones may have no state

    @property
    def num_unseen(self) -> int:
        """The first pages, which no layer sees, or of which dense pages have what is seen: they may be gone."""
        return self.num_pages - len(self.pages)

    @property
    def held_pages(self) -> Sequence[int]:
        if self.dense_pages or self.state_pages:
            return (*self.dense_pages, *self.pages, *self.state_pages)
        return self.pages


class PrefixReuse:
    """Uses the prefix cache for the scheduler's sequences.

    Sequences with a common prefix that arrive together, such as `n` samples of one prompt, are not computed side by
    side: the first one computes the pages, and the others wait for them.

    Where all layers have a window, the first pages of a prefix are needed no more once the window is past them. Then a
    prefix is found if its last pages are there, those that the token after it sees. Where some layers have one, dense
    pages may stand for the first ones.
    """

    def __init__(
        self, cache: PrefixCache, tiers: TierTraffic, waiting: WaitingQueue, limits: GangLimits, enabled: bool
    ) -> None:
        """`tiers`: none is behind the pool unless `enabled`. `waiting` is notified of pages that its sequences need not
        await any more.
        """
        self._cache, self._tiers, self._waiting = cache, tiers, waiting
        self._limits, self._block_size, self._enabled = limits, limits.block_size, enabled
        self._by_first_page: WeakValueDictionary[PageKey, GrowingSequence] = WeakValueDictionary()  # the last one
        # Full pages that running sequences are about to compute, or (None) that are being copied into the pool.
        self._pending: dict[PageKey, GrowingSequence | None] = {}
        # Running sequences whose last page has some tokens of their prompts and is not full, by the key before it. Of
        # several with the same key it is the last one.
        self._tails: dict[PageKey, GrowingSequence] = {}
        self._copies: list[PageCopy] = []  # for the next plan
        self._full_copies: list[FullLayersCopy] = []  # for the next plan
        self._copied_from: Counter[int] = Counter()  # pages that must not change until the plan has ended
        self._snapshots: dict[
            tuple[int, ...], StateSnapshot
        ] = {}  # states that uncommitted plans write, by their pages
        self._num_keys_left = MOST_KEYS  # that may be made in this step
        self.num_cached_tokens = 0  # tokens that were found and not computed, since the start
        self.num_kv_found = 0  # pages in the pool that the last look-up found, where a state after them is needed, too

    def prepare(self, sequence: GrowingSequence) -> None:
        """Computes the page keys of a new sequence; keys that it shares with an earlier one are copied from there."""
        num_keys = len(sequence.token_ids) // self._block_size
        if not self._enabled or not num_keys:
            return
        sequence.key_chain.extend(sequence.page_keys, sequence.token_ids, 1)
        first = sequence.page_keys[0]
        if (donor := self._donor_of(first)) is not None:
            sequence.page_keys = donor.page_keys[: self._num_common_pages(sequence, donor, num_keys)]
        self._by_first_page[first] = sequence
        self.make_keys(sequence)

    def bound_keys(self, is_bounded: bool) -> None:
        """From now on as many keys are made as needed, or if `is_bounded` MOST_KEYS until the next call.

        The keys of a long prompt take long, and others may wait for their next tokens.
        """
        self._num_keys_left = MOST_KEYS if is_bounded else sys.maxsize

    def make_keys(self, sequence: GrowingSequence) -> bool:
        """Makes keys that the sequence lacks, as many as may be made in this step. True: it has all."""
        if not self._enabled:
            return True
        num_keys = len(sequence.token_ids) // self._block_size
        if len(sequence.page_keys) >= num_keys:
            return True
        if self._num_keys_left > 0:
            self._copy_keys(sequence, num_keys)
        num_made = len(sequence.page_keys)
        num_more = min(num_keys - num_made, self._num_keys_left)
        if num_more > 0:
            sequence.key_chain.extend(sequence.page_keys, sequence.token_ids, num_made + num_more)
            self._num_keys_left -= num_more
            if num_made + num_more == num_keys:
                self._by_first_page[sequence.page_keys[0]] = sequence
        return len(sequence.page_keys) >= num_keys

    def _donor_of(self, first: PageKey) -> GrowingSequence | None:
        """The last sequence that begins with this page, if it still does: a beam may have forked since."""
        donor = self._by_first_page.get(first)
        return donor if donor is not None and donor.page_keys and donor.page_keys[0] == first else None

    def _copy_keys(self, sequence: GrowingSequence, num_keys: int) -> None:
        """Takes the keys of a common prefix from a sequence that has all of its own, whose keys are made by now."""
        donor = self._donor_of(sequence.page_keys[0]) if sequence.page_keys else None
        if donor is None or donor is sequence or len(donor.page_keys) <= len(sequence.page_keys):
            return
        if len(donor.page_keys) < len(donor.token_ids) // self._block_size:
            return
        num_common = self._num_common_pages(sequence, donor, num_keys)
        sequence.page_keys += donor.page_keys[len(sequence.page_keys) : num_common]
        self._num_keys_left -= _KEYS_OF_A_COPY

    def _num_common_pages(self, sequence: GrowingSequence, donor: GrowingSequence, num_keys: int) -> int:
        """The first pages, at most `num_keys`, of which the two have the same keys."""
        max_common = min(num_keys, len(donor.page_keys))
        first, second = sequence.key_chain, donor.key_chain
        if first.adapter != second.adapter:
            max_common = min(max_common, *(chain.num_base_pages for chain in (first, second) if chain.adapter))
        return _num_common_pages(sequence.token_ids, donor.token_ids, max_common, self._block_size)

    def find(self, sequence: GrowingSequence, keep: AbstractSet[Item]) -> FoundPrefix | None:
        """The sequence's prefix in the pool; None: it should wait for the next pages, which are coming.

        Starts copies of pages in a tier behind the pool; nothing in `keep` is evicted for them. At least one token is
        left to compute, since its logits choose the next one.
        """
        if not self._enabled:
            return FoundPrefix()
        if sequence.awaited_key in self._pending:
            if self._lacks_copies(sequence):
                self._bring_more(sequence, keep)
            return None
        keys = self._usable_keys(sequence)
        if self._limits.num_state_pages:
            return self._find_with_state(sequence, keys, keep)
        prefix = self._in_pool(keys)
        if self._limits.full_layers is not None and len(prefix.pages) > (max_pages := self._most_found(sequence)):
            prefix = self._cut(keys, prefix, max_pages)
            keys = keys[: prefix.num_pages]
        sequence.was_looked_up = True
        self._waiting.set_found(sequence, prefix.num_pages * self._block_size)
        base = prefix if self._limits.window is None else self._copy_base(keys, prefix)
        self._await_next(sequence, base, keys)
        if sequence.awaited_key is None:
            return prefix
        if sequence.awaited_key not in self._pending:
            self._bring(sequence, base, keys, keep)
        if base is not prefix and sequence.awaited_key not in self._pending:
            self._await_next(sequence, prefix, keys)
        return None if sequence.awaited_key in self._pending else prefix

    def _find_with_state(
        self, sequence: GrowingSequence, keys: Sequence[PageKey], keep: AbstractSet[Item]
    ) -> FoundPrefix | None:
        """As `find`, for a base with a recurrent state: only a state that comes brings a sequence further.

        So a prefix behind the pool is copied as a whole, with the state after it, or not at all.
        """
        prefix = self._with_state(keys)
        self.num_kv_found = prefix.num_kv_pages
        # The state is held until the sequence has its copy, so it could not be evicted for the rest.
        num_needed = self._limits.needed_pages(len(sequence.token_ids)) + sequence.num_adapter_pages
        has_room = num_needed + self._limits.num_state_pages <= self._limits.num_pages
        if not has_room:
            prefix = FoundPrefix(num_kv_pages=prefix.num_kv_pages)
        sequence.was_looked_up = True
        self._waiting.set_found(sequence, prefix.num_pages * self._block_size)
        sequence.first_wanted, sequence.num_here = 0, prefix.num_pages
        num_coming, sequence.awaited_key = self._state_coming(keys, prefix.num_pages)
        if has_room and self._tiers.can_bring():
            prefix, num_pages = self._with_state_behind(keys, prefix)
            if num_pages > max(prefix.num_pages, num_coming):
                chain = [*keys[:num_pages], state_key(keys[num_pages - 1])]
                sequence.awaited_key = self._bring_whole(chain, prefix.num_pages, keep) or sequence.awaited_key
        return prefix if sequence.awaited_key is None else None

    def _state_coming(self, keys: Sequence[PageKey], num_found: int) -> tuple[int, PageKey | None]:
        """Of the longest prefix with these keys, longer than `num_found` pages, whose state is being computed or
        copied: its pages, and the key to await. (0, None): there is none.
        """
        pending = self._pending
        num_copied = max(num_found, last_state(keys, pending.__contains__)) if self._tiers.num_moves else num_found
        for depth in range(len(keys), num_copied, -1) if pending else ():
            if pending.get(keys[depth - 1]) is not None:
                return depth, keys[depth - 1]
        return (num_copied, state_key(keys[num_copied - 1])) if num_copied > num_found else (0, None)

    def _with_state_behind(self, keys: Sequence[PageKey], prefix: FoundPrefix) -> tuple[FoundPrefix, int]:
        """The prefix with its `num_kv_pages` in all tiers, and how many of these have a state after them."""

        def is_there(key: PageKey) -> bool:
            return self._page_here_or_coming(key) is not None or self._tiers.holds(key)

        num_pages = prefix.num_kv_pages
        num_pages += sum(1 for _ in takewhile(is_there, islice(keys, num_pages, None)))
        keys = keys[:num_pages]
        num_with_state = max(self._cache.last_state(keys)[0], self._tiers.last_state(keys))
        return replace(prefix, num_kv_pages=num_pages), num_with_state

    def _bring_whole(self, chain: Sequence[PageKey], num_found: int, keep: AbstractSet[Item]) -> PageKey | None:
        """Starts copies of all that is behind the pool of these pages and of the state, whose key is the last.

        `num_found`: pages that need not be computed without it. Returns the key to await; None: nothing is copied.
        """
        pages, absent, state = list[int](), dict[PageKey, int](), chain[-1]
        for depth, key in enumerate(chain):
            if (page := self._page_here_or_coming(key)) is None:
                absent[key] = depth
            elif key != state:
                pages.append(page)
        if any(key in self._pending for key in absent):  # a sequence computes it
            return None
        num_spared = len(chain) - 1 - num_found
        pages += self._cache.pages_of(state) or ()
        if absent and not self._tiers.bring_whole(pages, absent, state, keep, num_spared):
            return None
        self._pending |= dict.fromkeys(absent)
        return next(key for key in reversed(chain) if key in self._pending)

    def found_beside(self, sequence: GrowingSequence, running: GrowingSequence) -> FoundPrefix:
        """The sequence's prefix in the pool, or what it has in common with a running one if that is more.

        Waits for nothing, and brings nothing there.
        """
        prefix = FoundPrefix()
        if self._enabled:
            keys = self._usable_keys(sequence)
            prefix = self._in_pool(keys)
            if self._limits.full_layers is not None:
                prefix = self._cut(keys, prefix, self._most_found(sequence))
        if self._limits.window is None and not self._limits.num_state_pages:
            max_pages = min(len(sequence.token_ids) - 1, running.num_computed) // self._block_size
            first = slice(self._block_size)
            if max_pages > prefix.num_pages and sequence.token_ids[first] == running.token_ids[first]:
                num_pages = _num_common_pages(sequence.token_ids, running.token_ids, max_pages, self._block_size)
            else:
                num_pages = 0
            if num_pages > prefix.num_pages:
                prefix = FoundPrefix(num_pages, running.pages[:num_pages])
        return prefix

    def prefix_here(self, sequence: GrowingSequence) -> PrefixHere:
        """What the pool has of a waiting sequence: a few look-ups, and nothing changes.

        An estimate, as pages before the last one may be gone: mostly the last ones of a prefix are evicted first.
        """
        keys, num_pages = sequence.page_keys, self._pages_here(sequence)[1].stop
        last_key = keys[num_pages - 1] if num_pages else None
        return PrefixHere(len(sequence.token_ids), num_pages * self._block_size, last_key)

    def pages_here(self, sequences: Iterable[GrowingSequence], max_pages: int) -> list[int]:
        """At most `max_pages` pages in the pool of the prefixes of these waiting sequences, in this order.

        Of a state it is the first page. It takes time linear in these pages.
        """
        pages: dict[int, None] = {}
        num_keys_left = 4 * max_pages  # in the search for states
        for sequence in sequences:
            new: list[int] = []
            num_dense, whole = self._pages_here(sequence)
            for index in range(min(num_dense + len(whole), max_pages) - 1, -1, -1):
                if index < num_dense:
                    page = self._cache.page_of(self._dense_key(sequence.page_keys, index))
                else:
                    page = self._cache.page_of(sequence.page_keys[whole[index - num_dense]])
                if page in pages:  # and with it all before it
                    break
                if page is not None:
                    new.append(page)
            if self._limits.num_state_pages and num_keys_left > 0:
                depth, state = self._cache.last_state(sequence.page_keys[: whole.stop])
                new += state[:1]
                num_keys_left -= whole.stop - depth
            pages |= dict.fromkeys(reversed(new))
            if len(pages) >= max_pages:
                break
        return [*islice(pages, max_pages)]

    def is_known(self, sequence: GrowingSequence) -> bool:
        """Whether the result of the last look-up of its prefix still holds; a cheap check."""
        key = sequence.awaited_key
        if not sequence.was_looked_up:
            return not self._enabled
        return key is None or (key not in self._pending and self._cache.page_of(key) is None)

    def key_to_await(self, sequence: GrowingSequence) -> PageKey:
        """The key of the last page that is coming for a sequence for which `find` returned None.

        Pages come in runs, so a few are looked up.
        """
        if self._limits.num_state_pages:
            assert sequence.awaited_key is not None
            return sequence.awaited_key
        keys, pending = sequence.page_keys, self._pending
        after = range(sequence.num_here + 1, self._num_usable(sequence))
        return keys[sequence.num_here + bisect_left(after, True, key=lambda depth: keys[depth] not in pending)]

    def last_coming(self, sequence: GrowingSequence, held_by_others: HeldByOthers) -> PageKey | None:
        """The key of the last page that is coming for it, if all pages before it are held, or are coming too."""
        num_pages = self.num_held_by_others(sequence, held_by_others)
        key = sequence.page_keys[num_pages - 1] if num_pages else None
        return key if key in self._pending else None

    def may_come_ahead(self, sequence: GrowingSequence, held_by_others: HeldByOthers) -> bool:
        """Whether `look_ahead` could start more copies for a sequence that cannot start yet.

        The prefix is looked up once, and again whenever the pages that were copied for it have arrived with all before
        them; more copies may follow meanwhile. So no page is copied twice while the sequence waits, even if it is
        evicted: `find` copies it again when the sequence can start.
        """
        if sequence.awaits_page is not None:  # the event that it is there leads to the next look-up
            return self._lacks_copies(sequence)
        if not sequence.was_looked_up:
            return self._tiers.can_bring() and self.make_keys(sequence)
        key, num_here = sequence.awaited_key, sequence.num_here
        if key in self._pending:  # shared by all sequences that wait for this prefix but the first
            return self._lacks_copies(sequence)
        if key is None or self._cache.page_of(key) is None or not self._tiers.can_bring():
            return False
        start = max(self.num_held_by_others(sequence, held_by_others), sequence.first_wanted)
        return start > num_here or len(self._cache.find(sequence.page_keys[start : num_here + 1])) > num_here - start

    def look_ahead(self, sequence: GrowingSequence, keep: AbstractSet[Item], held_by_others: HeldByOthers) -> None:
        """Starts copies for a sequence that cannot start yet, as `find` does.

        A sequence whose next pages are being computed awaits the last of them, and is not looked up before. If it lacks
        its adapter too, as that of an activated LoRA while the base's pages are computed, this is tried again.
        """
        key = self.last_coming(sequence, held_by_others) if sequence.awaits_page is None else None
        if key is None or self.is_being_copied(key):
            self.find(sequence, keep)
        elif self._waiting.is_equipped(sequence):
            self._waiting.await_page(sequence, key, 0)

    def idle_pages_of(self, sequence: GrowingSequence, held_by_others: HeldByOthers) -> list[int]:
        """Idle pages of its prefix in the pool, if it was looked up since it began to wait."""
        if not sequence.was_looked_up:
            return []
        first = max(self.num_held_by_others(sequence, held_by_others), sequence.first_wanted)
        max_pages = self._limits.most_pages(len(sequence.token_ids))
        pages = self._cache.find(sequence.page_keys[first : first + max_pages])
        if self._limits.num_state_pages:
            num_pages = min(len(pages), self._num_usable(sequence))
            pages += self._cache.last_state(sequence.page_keys[:num_pages])[1][:1]
        return pages

    def num_held_by_others(self, sequence: GrowingSequence, held_by_others: HeldByOthers) -> int:
        """Pages of its prefix that take no room when it starts: others hold or compute them, or they are coming.

        `held_by_others`: a memo, valid as long as no page is released.
        """
        if self._limits.num_state_pages:  # what is held may have no state
            return 0
        num_usable = self._num_usable(sequence) if self._enabled else 0
        keys = sequence.page_keys
        if not num_usable or (len(keys) < num_usable and not self.make_keys(sequence)):
            return 0
        num_held, last = held_by_others.get(keys[0], (0, b""))
        if num_held > num_usable or keys[num_held - 1] != last:
            num_held = 0
        num_held = self._cache.num_held(keys, num_held, num_usable, self._pending)
        if num_held:
            held_by_others[keys[0]] = (num_held, keys[num_held - 1])
        return num_held

    def is_being_copied(self, key: PageKey) -> bool:
        """The page is coming from a tier behind the pool."""
        return self._pending.get(key, self) is None

    def computing(self, key: PageKey | None) -> GrowingSequence | None:
        """The running sequence that is about to compute the page with this key; None: none is."""
        return None if key is None else self._pending.get(key)

    def stop_awaiting(self, keys: Iterable[PageKey]) -> None:
        """Copies of pages with these keys into the pool have ended, well or not."""
        for key in keys:
            if self._pending.get(key, self) is None:
                del self._pending[key]
                self._waiting.page_resolved(key)

    def enter(
        self, sequence: GrowingSequence, prefix: FoundPrefix, new_pages: Sequence[int], state_pages: Sequence[int] = ()
    ) -> None:
        """Starts the sequence on the pages of its `prefix` and on `new_pages` for the rest.

        `state_pages`: for its recurrent state, where the base has one.

        Its first own page begins as a copy of a kept page if the two have enough first tokens in common.
        """
        num_found, num_unseen = prefix.num_pages, prefix.num_unseen
        if prefix.state_pages:  # their hold is the copies' from now on
            self._copied_from.update(prefix.state_pages)
            self._copies += map(PageCopy, prefix.state_pages, state_pages)
        pages = (*repeat(0, num_unseen), *prefix.pages, *new_pages)
        sequence.hold(pages, num_unseen, tuple(prefix.dense_pages), tuple(state_pages))
        sequence.num_kept_pages = num_found
        sequence.num_computed = num_found * self._block_size + self._copy_begun(sequence, num_found)
        self.num_cached_tokens += sequence.num_computed
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        self._cache.count_uses(prefix.held_pages)
        self._tiers.touch(sequence.page_keys[num_unseen:num_found])
        if prefix.state_pages:
            self._tiers.touch([state_key(sequence.page_keys[num_found - 1])])
        keys = sequence.page_keys[num_found:]
        if self._limits.num_state_pages:
            keys = self._set_snapshots(sequence, prefix)
        if not sequence.is_scored:  # those here are not waited for
            keys = [*filter(self._is_absent, keys)]
        for key in keys:
            self._pending.setdefault(key, sequence)

    def _set_snapshots(self, sequence: GrowingSequence, prefix: FoundPrefix) -> list[PageKey]:
        """Sets after which positions a sequence that starts keeps its state. Returns the keys of the pages before them.

        Others begin like its prompt as a whole, up to the last page that it need not compute; or as it begins like the
        one before that has left KV without a state (Marconi, arXiv 2411.19379, §4.1).
        """
        sequence.last_snapshot, sequence.answer_snapshot = sequence.num_computed, 0
        start = sequence.num_computed
        block_size = self._block_size
        last = (len(sequence.token_ids) - 1) // block_size
        depths = sorted({prefix.num_kv_pages, last}) if self._enabled else []
        keys = sequence.page_keys
        depths = [each for each in depths if each * block_size > start and self._cache.state_of(keys[each - 1]) is None]
        sequence.snapshots_at = tuple(depth * block_size for depth in depths)
        return [keys[depth - 1] for depth in depths]

    def snapshot_positions(self, sequence: GrowingSequence, start: int, end: int) -> list[int]:
        """After which positions the chunk from `start` to `end` keeps the state.

        Beside those that the sequence has set, long prompts have one where KV has taken twice as many pages since.
        """
        if not self._enabled:
            return []
        positions = [position for position in sequence.snapshots_at if start <= position < end]
        last = (end - 1) // self._block_size * self._block_size
        if last > start and last - max([sequence.last_snapshot, *positions]) >= self._snapshot_interval:
            positions.append(last)
        return positions

    @property
    def _snapshot_interval(self) -> int:
        """Tokens whose KV takes twice as many pages as a state."""
        return 2 * self._limits.num_state_pages * self._block_size

    def keeps_answer(self, sequence: GrowingSequence, position: int) -> bool:
        """Whether the state of an answer is to be kept after so many tokens, which are whole pages.

        Not of a beam: few of them are a part of the next prompt.
        """
        num_tokens = position - max(sequence.last_snapshot, sequence.answer_snapshot)
        return self._enabled and sequence.beams is None and num_tokens >= _ANSWER_PAGES * self._block_size

    def begin_answer_snapshot(self, sequence: GrowingSequence, pages: tuple[int, ...]) -> StateSnapshot:
        """The next plan, which computes one token of the sequence, first copies its state to these pages."""
        position = sequence.next_position - 1
        state = StateSnapshot(sequence, position, pages, True, sequence.answer_snapshot)
        sequence.answer_snapshot = position
        self._begin_copy(state)
        return state

    def begin_snapshot(self, state: StateSnapshot, start: int) -> None:
        """The next plan, which computes the sequence from `start` on, writes this state to pages of its own."""
        state.sequence.last_snapshot = state.position
        if state.position == start:  # it is there before the plan is computed
            self._begin_copy(state)
        else:
            self._snapshots[state.pages] = state

    def _begin_copy(self, state: StateSnapshot) -> None:
        self._snapshots[state.pages] = state
        pages = state.sequence.state_pages
        self._cache.acquire(pages)
        self._copied_from.update(pages)
        self._copies += map(PageCopy, pages, state.pages)

    def skip_snapshot(self, sequence: GrowingSequence, position: int) -> None:
        """The state there is not kept, so none waits for it."""
        self._stop_coming(sequence, sequence.page_keys[position // self._block_size - 1])

    def end_snapshot(self, state: StateSnapshot, *, was_dropped: bool) -> None:
        """The plan has been computed. Others go on from the state, unless the sequence has left since.

        That of an answer takes the place of the one before, unless that is far enough from the last one that stays. So
        a sequence has one more than a prompt has, near its end, and tiers behind the pool get it when it leaves.
        """
        del self._snapshots[state.pages]
        sequence, depth = state.sequence, state.position // self._block_size
        if was_dropped:
            self._offer_state(sequence, state.position_before)
            self._cache.release(state.pages)
            return
        key = sequence.page_keys[depth - 1]
        first = sequence.last_snapshot if state.is_of_answer else sequence.num_at_start
        num_blocks = depth - first // self._block_size
        self._cache.insert_state(
            state.pages,
            state_key(key),
            depth,
            num_blocks,
            sequence.adapter_digest if depth > sequence.key_chain.num_base_pages else None,
        )
        self._cache.release(state.pages)
        if not state.is_of_answer:
            self._offer_state(sequence, state.position)
            self._stop_coming(sequence, key)
        elif state.position_before - sequence.last_snapshot >= self._snapshot_interval:
            sequence.last_snapshot = state.position_before
            self._offer_state(sequence, state.position_before)
        elif state.position_before:
            before = sequence.page_keys[state.position_before // self._block_size - 1]
            self._cache.forget_unused(state_key(before))

    def _offer_state(self, sequence: GrowingSequence, position: int) -> None:
        """The state after so many of the sequence's tokens is copied to the next tier, if it is in the pool."""
        depth = position // self._block_size
        if 0 < depth <= len(sequence.page_keys):
            key = state_key(sequence.page_keys[depth - 1])
            if (pages := self._cache.pages_of(key)) is not None:
                self._tiers.offer(pages, key)

    def is_shared(self, page: int, num_holders: int) -> bool:
        """Others than one sequence hold a page that is not full. Copies from it do not count."""
        return num_holders - self._copied_from[page] > 1

    def copy_shared(self, source: int, target: int) -> None:
        """The next plan copies a page that a sequence shares. Its hold is the copy's from now on."""
        self._copied_from[source] += 1
        self._copies.append(PageCopy(source, target))

    def take_copies(self) -> tuple[tuple[PageCopy, ...], tuple[FullLayersCopy, ...]]:
        """Copies within the pool for the next plan, and dense pages that it fills.

        `end_copies` and `end_full_copies` must follow.
        """
        copies, full_copies = tuple(self._copies), tuple(self._full_copies)
        self._copies, self._full_copies = [], []
        return copies, full_copies

    def end_copies(self, copies: Iterable[PageCopy]) -> None:
        """The copies of a plan have been made."""
        for copy in copies:
            self._end_copy(copy.source)
            self._cache.release((copy.source,))

    def end_full_copies(self, copies: Iterable[FullLayersCopy]) -> None:
        """A plan has filled these dense pages."""
        for copy in copies:
            for page in (*copy.sources, copy.target):
                self._end_copy(page)
            self._cache.release((*copy.sources, copy.target))

    def _end_copy(self, page: int) -> None:
        self._copied_from[page] -= 1
        if not self._copied_from[page]:
            del self._copied_from[page]

    def kept_dense(self, sequence: GrowingSequence) -> int | None:
        """The sequence's next dense page, if another sequence has filled it."""
        key = self._next_dense_key(sequence)
        return None if key is None else self._cache.page_of(key)

    def fill_dense(self, sequence: GrowingSequence, page: int) -> None:
        """The next plan fills the sequence's next dense page, which others may use from then on."""
        depths = sequence.next_dense
        sources = sequence.pages[depths.start : depths.stop]
        key = self._next_dense_key(sequence)
        if key is not None:
            self._cache.insert(
                page,
                key,
                depths.start,
                sequence.adapter_digest if depths.stop > sequence.key_chain.num_base_pages else None,
                len(depths),
            )
        pages = (*sources, page)
        self._cache.acquire(pages)
        self._copied_from.update(pages)
        self._full_copies.append(FullLayersCopy(sources, page))

    def _next_dense_key(self, sequence: GrowingSequence) -> PageKey | None:
        return dense_key(sequence.page_keys[sequence.next_dense[-1]]) if self._enabled else None

    def holders(self) -> Iterator[tuple[int, ...]]:
        """Pages that copies and uncommitted plans hold, for integrity checks."""
        yield from ((page,) for page in self._copied_from.elements())
        yield from self._snapshots

    def keep_filled(self, sequence: GrowingSequence) -> None:
        """Puts the pages that the sequence has filled into the prefix cache."""
        if not self._enabled:
            return
        num_full = sequence.num_computed // self._block_size
        if num_full == sequence.num_kept_pages:
            self._note_tail(sequence)
            return
        sequence.key_chain.extend(sequence.page_keys, sequence.token_ids, num_full)
        for depth in range(sequence.num_kept_pages, num_full):
            key = sequence.page_keys[depth]
            start = depth * self._block_size
            adapter = sequence.adapter_digest if depth >= sequence.key_chain.num_base_pages else None
            if self._cache.insert(sequence.pages[depth], key, depth, adapter):
                self._tiers.offer((sequence.pages[depth],), key)
                token_ids = sequence.token_ids[start : start + self._block_size]
                self._cache.index_content(key, sequence.key_chain.link(sequence.page_keys, depth), token_ids)
            if not (sequence.snapshots_at and depth + 1 == num_full and sequence.keeps_state(sequence.num_computed)):
                self._stop_coming(sequence, key)  # else its state comes with the next plan
        sequence.num_kept_pages = num_full
        self._note_tail(sequence)

    def _note_tail(self, sequence: GrowingSequence) -> None:
        """Once the sequence has all of its prompt, others may copy what it has of its last page."""
        self._forget_tail(sequence)
        depth = sequence.num_kept_pages
        num_tokens = sequence.num_prompt_tokens - depth * self._block_size
        is_prompt = 0 < num_tokens <= sequence.num_computed - depth * self._block_size
        if is_prompt and num_tokens > min_common_tokens(self._block_size):
            sequence.tail_link = sequence.key_chain.link(sequence.page_keys, depth)
            self._tails[sequence.tail_link] = sequence

    def _forget_tail(self, sequence: GrowingSequence) -> None:
        link, sequence.tail_link = sequence.tail_link, None
        if link is not None and self._tails.get(link) is sequence:
            del self._tails[link]

    def pass_pages(self, sequence: GrowingSequence, depths: range) -> None:
        """The window is past the pages at these depths. None goes on from there, so they are evicted first.

        Not those that the end of the prompt sees: another answer begins there, and so does the next turn of a
        conversation whose template leaves thoughts out.
        """
        num_given = sequence.num_given_tokens
        first, stop = self._limits.num_unseen_pages(num_given), pages_for(num_given, self._block_size)
        self._cache.mark_passed([sequence.pages[depth] for depth in depths if not first <= depth < stop])

    def leave(self, sequence: GrowingSequence) -> None:
        """The sequence stops running: its pages are released, if they are many in later steps."""
        self._forget_tail(sequence)
        self._offer_state(sequence, sequence.answer_snapshot)
        for key in sequence.page_keys[max(0, sequence.num_kept_pages - 1) :]:  # the last kept one may lack its state
            self._stop_coming(sequence, key)
        if self._copies:  # into its pages, which may be others' in the step that is planned
            pages = frozenset(sequence.held_pages)
            dropped = [copy for copy in self._copies if copy.target in pages]
            self._copies = [copy for copy in self._copies if copy.target not in pages]
            self.end_copies(dropped)
        self._cache.release_later(sequence.held_pages, sequence)
        sequence.hold(())
        sequence.num_computed = sequence.num_kept_pages = sequence.num_found = 0
        sequence.was_looked_up = sequence.tokens_sent = False
        sequence.awaited_key = sequence.num_brought = None
        sequence.snapshots_at = ()

    def disown(self, sequence: GrowingSequence) -> None:
        """Forgets the pages that the sequence has computed, in all tiers, as their numbers are not finite."""
        if self._enabled:
            num_full = sequence.num_computed // self._block_size
            sequence.key_chain.extend(sequence.page_keys, sequence.token_ids, num_full)
            keys = sequence.page_keys[:num_full]
            keys = [*keys, *map(state_key, keys)] if self._limits.num_state_pages else keys
            self._cache.forget([*keys, *self._dense_keys(keys)])
            self._tiers.forget(keys)

    def check_integrity(self, running: Sequence[GrowingSequence]) -> None:
        """Raises AssertionError if a page is awaited that no sequence computes and no copy brings."""
        computing = {id(sequence) for sequence in self._pending.values() if sequence is not None}
        assert computing <= {id(sequence) for sequence in running}
        num_state_pages = self._limits.num_state_pages
        assert all(len(pages) == num_state_pages for pages in self._snapshots), "a part of a state is kept, or too much"
        for sequence in running:
            position = sequence.answer_snapshot
            is_of_answer = (
                sequence.last_snapshot < position < sequence.next_position and not position % self._block_size
            )
            assert not position or is_of_answer, "a state of an answer is kept where there is none"
        copied = {key for key, sequence in self._pending.items() if sequence is None}
        assert copied == self._tiers.coming_keys(), "a page is awaited that no copy brings"
        assert all(s.tail_link == link for link, s in self._tails.items()), "a tail is not known as such"
        assert {id(s) for s in self._tails.values()} <= {id(sequence) for sequence in running}, (
            "a tail of none that runs"
        )
        assert self._waiting.awaited_keys() <= self._pending.keys(), "a page is awaited that is not coming"

    def _pages_here(self, sequence: GrowingSequence) -> tuple[int, range]:
        """What the pool has of a sequence's prefix: how many dense pages, and the depths of the whole ones after them.

        An estimate: of each kind, the first one is looked up, and none before the last one is taken to be gone. Where
        all layers have a window the first ones mostly are, and it is exact.
        """
        keys, page_of, layers = sequence.page_keys, self._cache.page_of, self._limits.full_layers
        num_keys = min(len(keys), self._num_usable(sequence))
        if layers is None and self._limits.window is not None:
            num_pages = self._num_reached(keys, num_keys, self._is_here)
            return 0, range(self._num_unseen(num_pages), num_pages)
        num_dense = num_stood_for = 0  # pages, and those that they stand for
        if layers is not None:
            dense = range(num_keys // layers.num_blocks)
            if dense and page_of(self._dense_key(keys, 0)) is not None:
                num_dense = bisect_left(dense, True, key=lambda index: page_of(self._dense_key(keys, index)) is None)
            num_stood_for = num_dense * layers.num_blocks
        if not num_keys or (not num_dense and page_of(keys[0]) is None):
            return 0, range(0)
        num_pages = bisect_left(range(num_keys), True, num_stood_for, key=lambda index: page_of(keys[index]) is None)
        if page_of(keys[num_pages - 1]) is None:  # what layers with a window see is gone
            return 0, range(0)
        if layers is None:
            return 0, range(num_pages)
        first = min(num_stood_for, self._num_unseen(num_pages))
        return first // layers.num_blocks, range(first // layers.num_blocks * layers.num_blocks, num_pages)

    def _dense_key(self, keys: Sequence[PageKey], index: int) -> PageKey:
        """Of the dense page of this index."""
        assert self._limits.full_layers is not None
        return dense_key(keys[(index + 1) * self._limits.full_layers.num_blocks - 1])

    def _usable_keys(self, sequence: GrowingSequence) -> list[PageKey]:
        """Keys of the full pages that the sequence need not compute if they are there."""
        sequence.key_chain.extend(sequence.page_keys, sequence.token_ids, len(sequence.token_ids) // self._block_size)
        return sequence.page_keys[: self._num_usable(sequence)]

    def _num_usable(self, sequence: GrowingSequence) -> int:
        """Full pages that the sequence need not compute if they are there: none whose rows are still to be scored."""
        num_tokens = len(sequence.token_ids) - 1 if sequence.is_scored else sequence.num_scored
        return num_tokens // self._block_size

    def _in_pool(self, keys: Sequence[PageKey]) -> FoundPrefix:
        """The longest prefix that is in the pool."""
        if self._limits.num_state_pages:
            return self._with_state(keys)
        if self._limits.window is None:
            pages = self._cache.find(keys)
            return FoundPrefix(len(pages), pages)
        return self._longest(keys, self._is_here)[1]

    def _with_state(self, keys: Sequence[PageKey]) -> FoundPrefix:
        """The longest prefix in the pool after which the recurrent state is there, too."""
        pages = self._cache.find(keys)
        num_pages, state = self._cache.last_state(keys[: len(pages)])
        return FoundPrefix(num_pages, pages[:num_pages], state_pages=state, num_kv_pages=len(pages))

    def _dense_keys(self, keys: Sequence[PageKey]) -> Iterable[PageKey]:
        """Of the dense pages for pages with these keys."""
        layers = self._limits.full_layers
        return () if layers is None else map(dense_key, islice(keys, layers.num_blocks - 1, None, layers.num_blocks))

    def _dense_pages(self, keys: Sequence[PageKey]) -> list[int]:
        """The first dense pages in the pool."""
        return self._cache.find(self._dense_keys(keys))

    def _most_found(self, sequence: GrowingSequence) -> int:
        """Pages of a prefix that the sequence may hold whole, so that the pool has room for the rest."""
        num_needed = self._limits.needed_pages(sequence.max_length - 1) + sequence.num_adapter_pages
        return self._limits.num_pages - num_needed

    def _cut(self, keys: Sequence[PageKey], prefix: FoundPrefix, max_pages: int) -> FoundPrefix:
        """A shorter prefix with at most so many pages that are whole."""
        while prefix.num_pages and len(prefix.pages) > max_pages:
            prefix = self._in_pool(keys[: max(0, prefix.num_pages - len(prefix.pages) + max_pages)])
        return prefix

    def _copy_base(self, keys: Sequence[PageKey], prefix: FoundPrefix) -> FoundPrefix:
        """To which pages are copied from a tier, with a window: `prefix`, or the begin of one in a longer prefix."""
        layers = self._limits.full_layers
        if layers is not None and not self._dense_pages(keys[: layers.num_blocks]):
            return prefix
        num_pages, longer_prefix = self._longest(
            keys, lambda key: self._page_here_or_coming(key) is not None or self._tiers.holds(key)
        )
        return longer_prefix if num_pages > prefix.num_pages else prefix

    def _longest(self, keys: Sequence[PageKey], is_there: Callable[[PageKey], bool]) -> tuple[int, FoundPrefix]:
        """The length of the longest prefix of which all that is needed whole `is_there`, and its begin in the pool."""
        layers, dense_pages = self._limits.full_layers, self._dense_pages(keys)
        num_dense = 0
        if layers is not None:
            num_dense = len(dense_pages) * layers.num_blocks
            keys = keys[: num_dense + sum(1 for _ in takewhile(is_there, islice(keys, num_dense, None)))]
        num_pages = self._num_reached(keys, len(keys), is_there)
        first = self._num_unseen(num_pages)
        if layers is not None:
            first = min(first, num_dense)
            del dense_pages[first // layers.num_blocks :]
        pages = self._cache.find(islice(keys, first, num_pages))
        return num_pages, FoundPrefix(first + len(pages), pages, dense_pages)

    def _num_reached(self, keys: Sequence[PageKey], num_pages: int, is_there: Callable[[PageKey], bool]) -> int:
        """The most first pages, up to `num_pages`, of which all that are needed whole for the token after them are
        there.

        The first absent page of a window is needed for all of its later ones, too. So few pages are looked up where
        most are absent.
        """
        while num_pages:
            seen = range(self._num_unseen(num_pages), num_pages)
            absent = next((index for index in seen if not is_there(keys[index])), None)
            if absent is None:
                break
            num_pages = absent
        return num_pages

    def _num_unseen(self, num_pages: int) -> int:
        return self._limits.num_unseen_pages(num_pages * self._block_size)

    def _await_next(self, sequence: GrowingSequence, prefix: FoundPrefix, keys: Sequence[PageKey]) -> None:
        """Notes the page after a prefix as the one that the sequence lacks."""
        sequence.first_wanted, sequence.num_here = prefix.num_unseen, prefix.num_pages
        sequence.awaited_key = keys[prefix.num_pages] if prefix.num_pages < len(keys) else None

    def _lacks_copies(self, sequence: GrowingSequence) -> bool:
        """Pages are being copied for the sequence, and copies of more of its prefix may start."""
        num_brought = sequence.num_brought
        return num_brought is not None and num_brought < self._num_usable(sequence) and self._tiers.can_bring()

    def _bring_more(self, sequence: GrowingSequence, keep: AbstractSet[Item]) -> None:
        """Starts copies of the pages that follow those that are coming for the sequence."""
        keys = self._usable_keys(sequence)
        assert sequence.num_brought is not None
        before = [self._page_here_or_coming(key) for key in keys[sequence.first_wanted : sequence.num_brought]]
        pages = [page for page in before if page is not None]
        if len(pages) == len(before):
            self._bring(sequence, FoundPrefix(sequence.num_brought, pages), keys, keep)
        else:  # one was evicted: the rest is looked up again when the awaited page is there
            sequence.num_brought = None

    def _bring(
        self, sequence: GrowingSequence, before: FoundPrefix, keys: Sequence[PageKey], keep: AbstractSet[Item]
    ) -> None:
        """Starts copies of as many pages of these keys as allowed, which follow the pages `before`."""
        absent = takewhile(self._is_absent, islice(keys, before.num_pages, None))
        num_spared = max(0, before.num_unseen - sequence.num_found // self._block_size)
        copy_keys = self._tiers.bring(before.pages, before.num_pages, absent, keep, num_spared)
        self._pending |= dict.fromkeys(copy_keys)
        sequence.num_brought = before.num_pages + len(copy_keys) if copy_keys else None

    def _page_here_or_coming(self, key: PageKey) -> int | None:
        page = self._cache.page_of(key)
        return self._tiers.page_coming(key) if page is None else page

    def _is_here(self, key: PageKey) -> bool:
        return self._cache.page_of(key) is not None

    def _is_absent(self, key: PageKey) -> bool:
        """The page is neither in the pool nor coming."""
        return self._cache.page_of(key) is None and key not in self._pending

    def _copy_begun(self, sequence: GrowingSequence, num_found: int) -> int:
        """Copies a page that has the first tokens after the first pages; returns the number of these tokens."""
        if self._limits.num_state_pages:  # a page's state is of its end
            return 0
        start = num_found * self._block_size
        remainder = sequence.token_ids[start : start + self._block_size]
        if len(remainder) == len(sequence.token_ids) - start:
            remainder = remainder[:-1]  # the last one is computed, since its logits choose the next token
        if not sequence.is_scored:
            remainder = remainder[: max(0, sequence.num_scored - start)]
        if not self._enabled or not remainder:
            return 0
        link = sequence.key_chain.link(sequence.page_keys, num_found)
        match = self._cache.find_partial(link, remainder, self._block_size)
        if match is not None:
            page, num_tokens = match
            self._cache.count_uses((page,))
        elif (tail := self._tails.get(link)) is not None and tail.num_gone <= num_found < len(tail.pages):
            page, ids = tail.pages[num_found], tail.token_ids[start : min(tail.num_computed, start + self._block_size)]
            num_tokens = common_prefix_len(ids, remainder)
            is_coming = any(copy.target == page for copy in self._copies)  # a beam's own copy, made in the same step
            if is_coming or num_tokens < min_common_tokens(self._block_size):
                return 0
        else:
            return 0
        self._cache.acquire((page,))
        self._copied_from[page] += 1
        self._copies.append(PageCopy(page, sequence.pages[num_found]))
        return num_tokens

    def _stop_coming(self, sequence: GrowingSequence, key: PageKey) -> None:
        if self._pending.get(key) is sequence:
            del self._pending[key]
            self._waiting.page_resolved(key)


def _num_common_pages(first: Sequence[int], second: Sequence[int], max_pages: int, block_size: int) -> int:
    """Number of first pages that two sequences have in common: at least 1, at most `max_pages`."""
    low, high = 1, max_pages
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * block_size, middle * block_size)
        low, high = (middle, high) if first[part] == second[part] else (low, middle - 1)
    return low
