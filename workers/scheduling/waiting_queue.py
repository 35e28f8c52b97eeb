"""Waiting sequences in fair order, and what those wait for that cannot start yet."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from ..fairness.prompt_budget import PrefixHere, PromptBursts, most_passed_over, to_promote
from ..fairness.tenant_counters import Key, MinQueue, TenantCounter, prompt_price
from ..memory.page_allocator import Item
from ..wire.page_keys import PageKey
from .growing_sequence import ARRIVAL_STEP, GrowingSequence, by_arrival, remove_by_arrival

_MAX_TENANTS_LOOKED_AT = 64  # in the search for the oldest sequence that lacks its adapter
_MAX_CHOICE = 64  # sequences of a tenant among which one is promoted
_MAX_CHOICES = 256  # the same, of all tenants in one call


class _TenantQueue:
    """A tenant's waiting sequences, oldest first."""

    __slots__ = ("counter", "equipped", "num_lacking", "num_left", "num_tokens", "oldest_lacking", "sequences")

    def __init__(self, counter: TenantCounter) -> None:
        self.counter = counter
        self.sequences: list[GrowingSequence] = []
        self.equipped: list[GrowingSequence] = []
        self.oldest_lacking: list[tuple[int, int]] = []  # a heap of arrival and id; outdated entries too
        self.num_lacking = 0
        self.num_tokens = 0
        self.num_left = 0  # sequences that have started or ended


class WaitingQueue:
    """First the tenant that was served least, and of a tenant the oldest sequence, or one that was promoted.

    A sequence either lacks its adapter, or is equipped; an equipped one may await a page that is being computed or
    copied. Events wake sequences that cannot start, so no step checks them. Adding, removing and looking at the first
    few take little longer with thousands of sequences or tenants than with a few.
    """

    def __init__(self, bursts: PromptBursts) -> None:
        self._bursts = bursts
        self._by_tenant: dict[TenantCounter, _TenantQueue] = {}  # only tenants with waiting sequences
        self._all = MinQueue[_TenantQueue](lambda queue: _key(queue.counter, queue.sequences))
        self._with_equipped = MinQueue[_TenantQueue](lambda queue: _key(queue.counter, queue.equipped))
        self._with_lacking = MinQueue[_TenantQueue](
            lambda queue: _key(queue.counter, queue.sequences) if queue.num_lacking else None
        )
        self._by_id: dict[int, GrowingSequence] = {}
        self._num_equipped = 0
        self._by_adapter: defaultdict[str, dict[int, GrowingSequence]] = defaultdict(dict)  # by digest, then by id
        self._lacking: set[str] = set()  # digests of absent adapters that waiting sequences need
        self._loaded_for: dict[str, GrowingSequence] = {}  # by digest: the sequence that an adapter was loaded for
        self._awaiting: defaultdict[PageKey, list[GrowingSequence]] = defaultdict(list)  # some may have left the queue
        self.num_lacking = 0  # sequences that lack their adapter
        self.num_awaiting = 0  # sequences that await a page
        self.num_tokens = 0  # of all sequences, neither computed nor found in the pool
        self.num_background_tokens = 0  # of these, those of background sequences

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[GrowingSequence]:
        return iter(self.first(len(self)))

    @property
    def has_one_tenant(self) -> bool:
        """All sequences here are of one tenant, so they are in the order of arrival."""
        return len(self._by_tenant) < 2

    def is_of(self, counters: Collection[TenantCounter]) -> bool:
        """All that wait are of one tenant, and `counters` has no other tenant's."""
        return len(self._by_tenant) < 2 and len(counters) < 2 and self._by_tenant.keys() >= {*counters}

    def first(self, num_sequences: int) -> list[GrowingSequence]:
        """The first `num_sequences`, or all if there are fewer."""
        if len(self._by_tenant) == 1:
            (queue,) = self._by_tenant.values()
            return queue.sequences[:num_sequences]
        if len(self._by_tenant) > num_sequences:
            turns = self._all.walk()
        else:  # all of them are needed, and sorting is quicker than walking
            turns = iter(sorted(self._by_tenant.values(), key=lambda queue: _place(queue.counter, queue.sequences)))
        return [*islice(_in_turn(turns, lambda queue: queue.sequences), num_sequences)]

    def equipped_in_turn(self, notes_turns: bool = False) -> Iterator[GrowingSequence]:
        """Sequences that have their adapter, in fair order. Invalid once another such iterator is made.

        With several tenants, or if `notes_turns`, sets each sequence's `turn`: the counter that its tenant would have
        after its prompts before this one.
        """
        if len(self._by_tenant) == 1 and not notes_turns:
            (queue,) = self._by_tenant.values()
            return iter(queue.equipped[:])
        return _in_turn(self._with_equipped.walk(), lambda queue: queue.equipped)

    def of_tenant(self, counter: TenantCounter) -> tuple[int, int]:
        """Number of a tenant's sequences here, and of their tokens, as `num_tokens` counts them."""
        queue = self._by_tenant.get(counter)
        return (0, 0) if queue is None else (len(queue.sequences), queue.num_tokens)

    @property
    def num_ready(self) -> int:
        """Sequences that lack nothing, as far as is known."""
        return self._num_equipped - self.num_awaiting

    def get(self, sequence_id: int) -> GrowingSequence | None:
        return self._by_id.get(sequence_id)

    def add(self, sequence: GrowingSequence, has_adapter: bool = True) -> None:
        """No other sequence here may have its id or its arrival."""
        assert sequence.sequence_id not in self._by_id, f"sequence {sequence.sequence_id} waits already"
        queue = self._by_tenant.get(sequence.counter)
        if queue is None:
            queue = self._by_tenant[sequence.counter] = _TenantQueue(sequence.counter)
        index = bisect_left(queue.sequences, sequence.arrival, key=by_arrival)
        queue.sequences.insert(index, sequence)
        sequence.last_place = queue.num_left + index + (0 if sequence.has_run else most_passed_over(index))
        self._all.put(queue)
        self._bursts.change(sequence.counter, 1)
        self._by_id[sequence.sequence_id] = sequence
        self._count_tokens(queue, sequence.num_uncomputed - sequence.num_found)
        digest = sequence.adapter_digest
        if digest is not None:
            assert has_adapter == (digest not in self._lacking) or not self._by_adapter[digest]
            self._by_adapter[digest][sequence.sequence_id] = sequence
        if has_adapter:
            insort(queue.equipped, sequence, key=by_arrival)
            self._num_equipped += 1
            self._with_equipped.put(queue)
        else:
            assert digest is not None
            self._lacking.add(digest)
            self._lack(queue, sequence)

    def remove(self, sequence: GrowingSequence) -> bool:
        """Removes a sequence, which must be here. Returns whether its adapter was loaded for it."""
        assert self._by_id.get(sequence.sequence_id) is sequence
        queue = self._by_tenant[sequence.counter]
        remove_by_arrival(queue.sequences, sequence)
        queue.num_left += 1
        self._bursts.change(sequence.counter, -1)
        del self._by_id[sequence.sequence_id]
        self._count_tokens(queue, sequence.num_found - sequence.num_uncomputed)
        digest = sequence.adapter_digest
        if digest in self._lacking:
            queue.num_lacking -= 1
            self.num_lacking -= 1
        else:
            remove_by_arrival(queue.equipped, sequence)
            self._num_equipped -= 1
            self._stop_awaiting(sequence)
        if digest is not None:
            del self._by_adapter[digest][sequence.sequence_id]
            if not self._by_adapter[digest]:
                del self._by_adapter[digest]
                self._lacking.discard(digest)
        if not queue.sequences:
            del self._by_tenant[sequence.counter]
        if sequence.own_arrival is not None:
            sequence.arrival, sequence.own_arrival = sequence.own_arrival, None
        if digest is None or self._loaded_for.get(digest) is not sequence:
            return False
        del self._loaded_for[digest]
        return True

    def promote(self, max_starts: int, prefix_here: Callable[[GrowingSequence], PrefixHere]) -> None:
        """Moves sequences before older ones of their tenants, if more of their prefixes is in the pool (`to_promote`).

        Only the next `max_starts` that could start are passed over, and no sequence more often than `most_passed_over`.
        One that was promoted keeps its place until it starts or ends, so that what is loaded or reserved for the first
        ones stays theirs.
        """
        queues = [queue for queue in islice(self._with_equipped.walk(), max_starts) if len(queue.equipped) > 1]
        num_choices = _MAX_CHOICES
        for queue in queues:
            place = 0
            for _ in range(-(-max_starts // len(queues))):
                choice = self._choice(queue, place)
                num_choices -= len(choice)
                if not choice or num_choices < 0:
                    break
                chosen = to_promote([prefix_here(sequence) for _, sequence in choice]) if len(choice) > 1 else None
                if chosen is not None:
                    self._promote(queue, choice[chosen][1], choice[0][0])
                place = choice[0][0] + 1

    def begin_load(self, sequence: GrowingSequence) -> None:
        """The adapter of a waiting sequence begins to be loaded for it."""
        assert sequence.adapter_digest is not None
        self._loaded_for[sequence.adapter_digest] = sequence

    def loaded_for(self) -> list[GrowingSequence]:
        """Sequences whose adapters were loaded, or are being loaded, for them: these stay until they start or end.

        Otherwise, as tenants change places, the next load could evict what was loaded before it is used, without end.
        None if all here are of one tenant, since these change no places.
        """
        return [] if self.has_one_tenant else [*self._loaded_for.values()]

    def kept_from(self, sequence: GrowingSequence) -> set[Item]:
        """Digests of adapters that stay for sequences of other tenants, and must not be evicted for this one.

        Background work keeps nothing from other work.
        """
        counter = sequence.counter
        return {
            digest
            for digest, each in self._loaded_for.items()
            if each.counter is not counter and each.counter.is_background <= counter.is_background
        }

    def stop_keeping(self) -> None:
        """Adapters stay for no sequence any more."""
        self._loaded_for.clear()

    def of_adapter(self, digest: str) -> list[GrowingSequence]:
        """Sequences that will use the adapter."""
        return [*self._by_adapter.get(digest, {}).values()]

    def adapter_loaded(self, digest: str) -> None:
        """The adapter is in the pool."""
        if digest in self._lacking:
            self._lacking.remove(digest)
            for queue, came in self._grouped_by_tenant(digest).items():
                queue.num_lacking -= len(came)
                self.num_lacking -= len(came)
                self._num_equipped += len(came)
                queue.equipped = sorted([*queue.equipped, *came], key=by_arrival)
                self._with_equipped.put(queue)

    def adapter_evicted(self, digest: str) -> None:
        """The adapter is not in the pool any more."""
        self._loaded_for.pop(digest, None)
        if digest in self._by_adapter:
            self._lacking.add(digest)
            for queue, lacking in self._grouped_by_tenant(digest).items():
                queue.equipped = [sequence for sequence in queue.equipped if sequence.adapter_digest != digest]
                self._num_equipped -= len(lacking)
                for sequence in lacking:
                    self._stop_awaiting(sequence)
                    self._lack(queue, sequence)

    def oldest_lacking(self, is_absent: Callable[[str], bool]) -> GrowingSequence | None:
        """The first sequence in fair order whose adapter is neither in the pool nor being loaded.

        None also if the first _MAX_TENANTS_LOOKED_AT tenants have none.
        """
        if not self.num_lacking:
            return None
        for queue in islice(self._with_lacking.walk(), _MAX_TENANTS_LOOKED_AT):
            if (sequence := self._oldest_lacking_of(queue, is_absent)) is not None:
                return sequence
        return None

    def is_equipped(self, sequence: GrowingSequence) -> bool:
        """Its adapter is in the pool, or it has none."""
        return sequence.adapter_digest not in self._lacking

    def await_page(self, sequence: GrowingSequence, key: PageKey, num_reserved_pages: int) -> None:
        """An equipped sequence cannot start before `page_resolved(key)`. It will take `num_reserved_pages` then."""
        assert sequence.awaits_page is None and self.is_equipped(sequence)
        sequence.awaits_page, sequence.num_reserved_pages = key, num_reserved_pages
        self.num_awaiting += 1
        self._awaiting[key].append(sequence)

    def page_resolved(self, key: PageKey) -> None:
        """The page with this key is there, or is no longer being computed or copied."""
        for sequence in self._awaiting.pop(key, ()):
            if sequence.awaits_page == key:  # otherwise it has left, or awaits another one
                self._stop_awaiting(sequence)

    def awaited_keys(self) -> set[PageKey]:
        """For integrity checks."""
        return {sequence.awaits_page for sequence in self._by_id.values() if sequence.awaits_page is not None}

    def set_found(self, sequence: GrowingSequence, num_tokens: int) -> None:
        """`num_tokens` of its tokens were found in the pool."""
        self._count_tokens(self._by_tenant[sequence.counter], sequence.num_found - num_tokens)
        sequence.num_found = num_tokens

    def check_integrity(self, is_here: Callable[[str], bool] | None = None) -> None:
        """Raises AssertionError if sequences are out of order, not known by their ids, or miscounted.

        `is_here`: whether an adapter is in the pool.
        """
        queues, all_here = self._by_tenant.values(), [*self._by_id.values()]
        for queue in queues:
            for sequences in (queue.sequences, queue.equipped):
                arrivals = [sequence.arrival for sequence in sequences]
                assert arrivals == sorted(set(arrivals)), "the queue is out of order"
            assert all(sequence.counter is queue.counter for sequence in queue.sequences)
            lacking = [sequence for sequence in queue.sequences if sequence.adapter_digest in self._lacking]
            assert {*lacking, *queue.equipped} == {*queue.sequences} and queue.num_lacking == len(lacking)
            assert len(lacking) + len(queue.equipped) == len(queue.sequences), "a sequence lacks its adapter and has it"
            assert queue.num_tokens == sum(s.num_uncomputed - s.num_found for s in queue.sequences)
        queued = [sequence for queue in queues for sequence in queue.sequences]
        assert {sequence.sequence_id: sequence for sequence in queued} == self._by_id, "ids and queue differ"
        assert len(queued) == len(self._by_id) and all(queue.sequences for queue in queues)
        assert {*self} == {*queued}, "a walk in fair order misses a sequence"
        assert {*self.equipped_in_turn()} == {each for queue in queues for each in queue.equipped}
        assert self.num_lacking == sum(queue.num_lacking for queue in queues)
        assert self._num_equipped == sum(len(queue.equipped) for queue in queues)
        awaiting = [sequence for sequence in all_here if sequence.awaits_page is not None]
        assert self.num_awaiting == len(awaiting)
        assert all(sequence in self._awaiting[sequence.awaits_page or b""] for sequence in awaiting), (
            "a sequence would never be woken"
        )
        assert self.num_tokens == sum(queue.num_tokens for queue in queues), "tokens are miscounted"
        assert self.num_background_tokens == sum(queue.num_tokens for queue in queues if queue.counter.is_background)
        assert all(self._by_id.get(s.sequence_id) is s for s in self._loaded_for.values()), (
            "an adapter stays for nothing"
        )
        if is_here is not None:
            digests = {s.adapter_digest for s in all_here if s.adapter_digest is not None}
            assert {digest for digest in digests if not is_here(digest)} == self._lacking, "an adapter came or went"

    def _choice(self, queue: _TenantQueue, place: int) -> list[tuple[int, GrowingSequence]]:
        """The first sequence from this place on that could start, and those that may pass it over; with places."""
        choice: list[tuple[int, GrowingSequence]] = []
        for index in range(place, min(place + _MAX_CHOICE, len(queue.sequences))):
            sequence = queue.sequences[index]
            if choice and sequence.request.priority != choice[0][1].request.priority:
                break
            if sequence.awaits_page is None and sequence.adapter_digest not in self._lacking:
                if sequence.own_arrival is None:
                    choice.append((index, sequence))
                elif not choice:  # it was promoted already
                    return [(index, sequence)]
            if choice and sequence.last_place <= queue.num_left + index:
                break
        return choice

    def _promote(self, queue: _TenantQueue, sequence: GrowingSequence, place: int) -> None:
        """Moves a sequence forward to this place of its tenant's order, where one is that was not promoted."""
        before, following = queue.sequences[place - 1] if place else None, queue.sequences[place]
        remove_by_arrival(queue.sequences, sequence)
        remove_by_arrival(queue.equipped, sequence)
        sequence.own_arrival = sequence.arrival
        sequence.arrival = following.arrival - ARRIVAL_STEP + 1
        if before is not None and before.own_arrival is not None:
            sequence.arrival = before.arrival + 1
        queue.sequences.insert(place, sequence)
        insort(queue.equipped, sequence, key=by_arrival)

    def _grouped_by_tenant(self, digest: str) -> dict[_TenantQueue, list[GrowingSequence]]:
        """Sequences that will use the adapter."""
        groups: dict[_TenantQueue, list[GrowingSequence]] = {}
        for sequence in self._by_adapter[digest].values():
            groups.setdefault(self._by_tenant[sequence.counter], []).append(sequence)
        return groups

    def _count_tokens(self, queue: _TenantQueue, more: int) -> None:
        queue.num_tokens += more
        self.num_tokens += more
        if queue.counter.is_background:
            self.num_background_tokens += more

    def _lack(self, queue: _TenantQueue, sequence: GrowingSequence) -> None:
        queue.num_lacking += 1
        self.num_lacking += 1
        self._with_lacking.put(queue)
        heappush(queue.oldest_lacking, (sequence.arrival, sequence.sequence_id))
        if len(queue.oldest_lacking) > 2 * queue.num_lacking + 64:
            lacking = [each for each in queue.sequences if each.adapter_digest in self._lacking]
            queue.oldest_lacking = [(each.arrival, each.sequence_id) for each in lacking]
            heapify(queue.oldest_lacking)

    def _oldest_lacking_of(self, queue: _TenantQueue, is_absent: Callable[[str], bool]) -> GrowingSequence | None:
        while queue.oldest_lacking:
            arrival, sequence_id = queue.oldest_lacking[0]
            sequence = self._by_id.get(sequence_id)
            if sequence is not None and sequence.arrival == arrival:
                digest = sequence.adapter_digest
                if digest in self._lacking and is_absent(digest):
                    return sequence
            heappop(
                queue.oldest_lacking
            )  # it has left, or its adapter is loading; if that is evicted, it is added again
        return None

    def _stop_awaiting(self, sequence: GrowingSequence) -> None:
        if sequence.awaits_page is not None:
            sequence.awaits_page, sequence.num_reserved_pages = None, 0
            self.num_awaiting -= 1


def _place(counter: TenantCounter, sequences: list[GrowingSequence]) -> Key:
    """Its tenant's position in the fair order; equal tenants go in the order of their oldest sequences."""
    return counter.is_background, counter.value, sequences[0].arrival


def _key(counter: TenantCounter, sequences: list[GrowingSequence]) -> Key | None:
    return _place(counter, sequences) if sequences else None


def _in_turn(
    walk: Iterator[_TenantQueue], of: Callable[[_TenantQueue], list[GrowingSequence]]
) -> Iterator[GrowingSequence]:
    """Sequences of all queues in fair order; sets each one's `turn`. `walk`: the queues in this order."""
    merging: list[tuple[Key, list[GrowingSequence], int]] = []  # a heap of the queues begun
    following = next(walk, None)
    while merging or following is not None:
        key = None if following is None else _key(following.counter, of(following))
        if following is not None and key is None:  # all of its sequences have left
            following = next(walk, None)
            continue
        if following is not None and key is not None and (not merging or key < merging[0][0]):
            sequences, index = of(following)[:], 0
            following = next(walk, None)
        else:
            key, sequences, index = heappop(merging)
        sequence = sequences[index]
        sequence.turn = key
        yield sequence
        index += 1
        if index < len(sequences):
            price = prompt_price(max(sequence.num_uncomputed - sequence.num_found, 1))
            further = key[1] + price / sequence.counter.weight
            heappush(merging, ((key[0], further, sequences[index].arrival), sequences, index))
