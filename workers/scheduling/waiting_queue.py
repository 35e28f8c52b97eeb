"""The sequences that wait for their turn, in fair order, and what those wait for that cannot start."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from operator import attrgetter

from ..fairness.least_first import Key, LeastFirst
from ..fairness.prices import prompt_price
from ..fairness.standing import Standing
from ..wire.page_keys import PageKey
from .sequence import Sequence

_arrival = attrgetter("arrival")


_MAX_LINES_LOOKED_AT = 64  # tenants, for the oldest sequence that lacks its adapter


class _Line:
    """A tenant's waiting sequences, oldest first."""

    __slots__ = ("equipped", "num_lacking", "num_tokens", "oldest_lacking", "sequences", "standing")

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.sequences: list[Sequence] = []
        self.equipped: list[Sequence] = []
        self.oldest_lacking: list[tuple[int, int]] = []  # a heap of arrival and id; outdated entries too
        self.num_lacking = 0
        self.num_tokens = 0


class WaitingQueue:
    """The next one first: of all tenants whoever was served least, of a tenant the oldest.

    Sequences that cannot start are told when they can, so that nobody asks them in every step. A sequence lacks its
    adapter, or it is equipped; an equipped one may await a page that somebody computes or copies. Adding and removing a
    sequence takes little longer in a queue of thousands than in a short one, and so does looking at the first few,
    however many tenants there are.
    """

    def __init__(self) -> None:
        self._lines: dict[Standing, _Line] = {}  # of tenants that have any here
        self._all = LeastFirst[_Line](lambda line: _key(line.standing, line.sequences))
        self._with_equipped = LeastFirst[_Line](lambda line: _key(line.standing, line.equipped))
        self._with_lacking = LeastFirst[_Line](
            lambda line: _key(line.standing, line.sequences) if line.num_lacking else None
        )
        self._by_id: dict[int, Sequence] = {}
        self._num_equipped = 0
        self._by_adapter: defaultdict[str, dict[int, Sequence]] = defaultdict(dict)  # by digest, then by id
        self._lacking: set[str] = set()  # digests of adapters that are not there, and that somebody waits for
        self._awaiting: defaultdict[PageKey, list[Sequence]] = defaultdict(list)  # some may have left the queue
        self.num_lacking = 0  # sequences that lack their adapter
        self.num_awaiting = 0  # sequences that await a page
        self.num_tokens = 0  # of all sequences, that are neither computed nor were found in the pool
        self.num_background_tokens = 0  # of these, those of background sequences

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.first(len(self)))

    @property
    def is_of_one(self) -> bool:
        """No two tenants have anything here: sequences come by arrival alone."""
        return len(self._lines) < 2

    def is_of(self, standings: Collection[Standing]) -> bool:
        """All that wait are of one tenant, and `standings` are that one's alone."""
        return len(self._lines) < 2 and len(standings) < 2 and self._lines.keys() >= {*standings}

    def first(self, num_sequences: int) -> list[Sequence]:
        """The first `num_sequences`, or all if there are fewer."""
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return line.sequences[:num_sequences]
        return [*islice(_in_turn(self._all, lambda line: line.sequences), num_sequences)]

    def equipped_in_turn(self, notes_turns: bool = False) -> Iterator[Sequence]:
        """Sequences whose adapter is there, as they come. Good for as long as it is the last iterator that was made.

        If tenants differ, or if `notes_turns`, it is noted as each one's `turn`, where its tenant is taken to have been
        served the prompts before it.
        """
        if len(self._lines) == 1 and not notes_turns:
            (line,) = self._lines.values()
            return iter(line.equipped[:])
        return _in_turn(self._with_equipped, lambda line: line.equipped)

    def of_standing(self, standing: Standing) -> tuple[int, int]:
        """How many sequences of a tenant are here, and of how many tokens, as `num_tokens` counts them."""
        line = self._lines.get(standing)
        return (0, 0) if line is None else (len(line.sequences), line.num_tokens)

    @property
    def num_ready(self) -> int:
        """Sequences that lack nothing, as far as is known."""
        return self._num_equipped - self.num_awaiting

    def get(self, sequence_id: int) -> Sequence | None:
        return self._by_id.get(sequence_id)

    def add(self, sequence: Sequence, has_adapter: bool = True) -> None:
        """No other sequence here may have its id or its arrival."""
        assert sequence.sequence_id not in self._by_id, f"sequence {sequence.sequence_id} waits already"
        line = self._lines.get(sequence.standing)
        if line is None:
            line = self._lines[sequence.standing] = _Line(sequence.standing)
        insort(line.sequences, sequence, key=_arrival)
        self._all.put(line)
        self._by_id[sequence.sequence_id] = sequence
        self._count_tokens(line, sequence.num_uncomputed - sequence.num_found)
        digest = sequence.adapter_digest
        if digest is not None:
            assert has_adapter == (digest not in self._lacking) or not self._by_adapter[digest]
            self._by_adapter[digest][sequence.sequence_id] = sequence
        if has_adapter:
            self._equip(line, sequence)
        else:
            assert digest is not None
            self._lacking.add(digest)
            self._lack(line, sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence must be here."""
        assert self._by_id.get(sequence.sequence_id) is sequence
        line = self._lines[sequence.standing]
        _take_out(line.sequences, sequence)
        del self._by_id[sequence.sequence_id]
        self._count_tokens(line, sequence.num_found - sequence.num_uncomputed)
        digest = sequence.adapter_digest
        if digest in self._lacking:
            self._stop_lacking(line)
        else:
            _take_out(line.equipped, sequence)
            self._num_equipped -= 1
            self._stop_awaiting(sequence)
        if digest is not None:
            del self._by_adapter[digest][sequence.sequence_id]
            if not self._by_adapter[digest]:
                del self._by_adapter[digest]
                self._lacking.discard(digest)
        if not line.sequences:
            del self._lines[sequence.standing]

    def of_adapter(self, digest: str) -> list[Sequence]:
        """Sequences that will use the adapter."""
        return [*self._by_adapter.get(digest, {}).values()]

    def adapter_came(self, digest: str) -> None:
        """The adapter is in the pool."""
        if digest in self._lacking:
            self._lacking.remove(digest)
            for line, came in self._by_line(digest).items():
                line.num_lacking -= len(came)
                self.num_lacking -= len(came)
                self._num_equipped += len(came)
                line.equipped = sorted([*line.equipped, *came], key=_arrival)
                self._with_equipped.put(line)

    def adapter_went(self, digest: str) -> None:
        """The adapter is not in the pool any more."""
        if digest in self._by_adapter:
            self._lacking.add(digest)
            for line, lacking in self._by_line(digest).items():
                line.equipped = [sequence for sequence in line.equipped if sequence.adapter_digest != digest]
                self._num_equipped -= len(lacking)
                for sequence in lacking:
                    self._stop_awaiting(sequence)
                    self._lack(line, sequence)

    def oldest_lacking(self, is_absent: Callable[[str], bool]) -> Sequence | None:
        """The first sequence whose adapter is not there and not coming either: the oldest of whoever was served least.

        None too if, of many tenants, all that come first only lack adapters that are coming.
        """
        if not self.num_lacking:
            return None
        for line in islice(self._with_lacking.walk(), _MAX_LINES_LOOKED_AT):
            if (sequence := self._oldest_lacking_of(line, is_absent)) is not None:
                return sequence
        return None

    def await_page(self, sequence: Sequence, key: PageKey, num_reserved_pages: int) -> None:
        """An equipped sequence cannot start before `page_came(key)`. It will take so many pages then."""
        assert sequence.awaits_page is None
        sequence.awaits_page, sequence.num_reserved_pages = key, num_reserved_pages
        self.num_awaiting += 1
        self._awaiting[key].append(sequence)

    def page_came(self, key: PageKey) -> None:
        """Nobody computes or copies a page with this key any more: it is there, or will not come."""
        for sequence in self._awaiting.pop(key, ()):
            if sequence.awaits_page == key:  # else it has left, or awaits another one
                self._stop_awaiting(sequence)

    def awaited_keys(self) -> set[PageKey]:
        """For integrity checks."""
        return {sequence.awaits_page for sequence in self._by_id.values() if sequence.awaits_page is not None}

    def tell_found(self, sequence: Sequence, num_tokens: int) -> None:
        """So many of its tokens were found in the pool."""
        self._count_tokens(self._lines[sequence.standing], sequence.num_found - num_tokens)
        sequence.num_found = num_tokens

    def check_integrity(self, is_here: Callable[[str], bool] | None = None) -> None:
        """Raises AssertionError if sequences are out of order, not known by their ids, or miscounted.

        `is_here`: whether an adapter is in the pool.
        """
        lines, all_here = self._lines.values(), [*self._by_id.values()]
        for line in lines:
            for sequences in (line.sequences, line.equipped):
                arrivals = [sequence.arrival for sequence in sequences]
                assert arrivals == sorted(set(arrivals)), "the queue is out of order"
            assert all(sequence.standing is line.standing for sequence in line.sequences)
            lacking = [sequence for sequence in line.sequences if sequence.adapter_digest in self._lacking]
            assert {*lacking, *line.equipped} == {*line.sequences} and line.num_lacking == len(lacking)
            assert len(lacking) + len(line.equipped) == len(line.sequences), "a sequence lacks its adapter and has it"
            assert line.num_tokens == sum(s.num_uncomputed - s.num_found for s in line.sequences)
        queued = [sequence for line in lines for sequence in line.sequences]
        assert {sequence.sequence_id: sequence for sequence in queued} == self._by_id, "ids and queue differ"
        assert len(queued) == len(self._by_id) and all(line.sequences for line in lines)
        assert {*self} == {*queued}, "a walk in fair order misses somebody"
        assert {*self.equipped_in_turn()} == {each for line in lines for each in line.equipped}
        assert self.num_lacking == sum(line.num_lacking for line in lines)
        assert self._num_equipped == sum(len(line.equipped) for line in lines)
        awaiting = [sequence for sequence in all_here if sequence.awaits_page is not None]
        assert self.num_awaiting == len(awaiting)
        assert all(sequence in self._awaiting[sequence.awaits_page or b""] for sequence in awaiting), "nobody wakes it"
        assert self.num_tokens == sum(line.num_tokens for line in lines), "tokens are miscounted"
        assert self.num_background_tokens == sum(line.num_tokens for line in lines if line.standing.is_background)
        if is_here is not None:
            digests = {s.adapter_digest for s in all_here if s.adapter_digest is not None}
            assert {digest for digest in digests if not is_here(digest)} == self._lacking, "an adapter came or went"

    def _by_line(self, digest: str) -> dict[_Line, list[Sequence]]:
        """Sequences that will use the adapter."""
        found: dict[_Line, list[Sequence]] = {}
        for sequence in self._by_adapter[digest].values():
            found.setdefault(self._lines[sequence.standing], []).append(sequence)
        return found

    def _count_tokens(self, line: _Line, more: int) -> None:
        line.num_tokens += more
        self.num_tokens += more
        if line.standing.is_background:
            self.num_background_tokens += more

    def _equip(self, line: _Line, sequence: Sequence) -> None:
        insort(line.equipped, sequence, key=_arrival)
        self._num_equipped += 1
        self._with_equipped.put(line)

    def _lack(self, line: _Line, sequence: Sequence) -> None:
        line.num_lacking += 1
        self.num_lacking += 1
        self._with_lacking.put(line)
        heappush(line.oldest_lacking, (sequence.arrival, sequence.sequence_id))
        if len(line.oldest_lacking) > 2 * line.num_lacking + 64:
            lacking = [each for each in line.sequences if each.adapter_digest in self._lacking]
            line.oldest_lacking = [(each.arrival, each.sequence_id) for each in lacking]
            heapify(line.oldest_lacking)

    def _stop_lacking(self, line: _Line) -> None:
        line.num_lacking -= 1
        self.num_lacking -= 1

    def _oldest_lacking_of(self, line: _Line, is_absent: Callable[[str], bool]) -> Sequence | None:
        while line.oldest_lacking:
            arrival, sequence_id = line.oldest_lacking[0]
            sequence = self._by_id.get(sequence_id)
            if sequence is not None and sequence.arrival == arrival:
                digest = sequence.adapter_digest
                if digest in self._lacking and is_absent(digest):
                    return sequence
            heappop(line.oldest_lacking)  # it left, or its adapter comes; if that goes again, it is added again
        return None

    def _stop_awaiting(self, sequence: Sequence) -> None:
        if sequence.awaits_page is not None:
            sequence.awaits_page, sequence.num_reserved_pages = None, 0
            self.num_awaiting -= 1


def _key(standing: Standing, sequences: list[Sequence]) -> Key | None:
    """Its tenant's place in the fair order; tenants that are equal come as their oldest sequences came."""
    return (standing.is_background, standing.counter, sequences[0].arrival) if sequences else None


def _in_turn(lines: LeastFirst[_Line], of: Callable[[_Line], list[Sequence]]) -> Iterator[Sequence]:
    """Sequences of all lines in fair order, and notes each one's turn."""
    merging: list[tuple[Key, list[Sequence], int]] = []  # a heap: of each line that was begun, whose turn is next
    walk = lines.walk()
    following = next(walk, None)
    while merging or following is not None:
        if following is not None:
            sequences = of(following)[:]
            key = _key(following.standing, sequences)
            if key is None or not merging or key < merging[0][0]:
                if key is not None:
                    heappush(merging, (key, sequences, 0))
                following = next(walk, None)
                continue
        key, sequences, index = merging[0]
        sequence = sequences[index]
        sequence.turn = key
        yield sequence
        if index + 1 == len(sequences):
            heappop(merging)
            continue
        price = prompt_price(max(sequence.num_uncomputed - sequence.num_found, 1))
        further = key[1] + price / sequence.standing.weight
        heapreplace(merging, ((key[0], further, sequences[index + 1].arrival), sequences, index + 1))


def _take_out(sequences: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(sequences, sequence.arrival, key=_arrival)
    assert sequences[index] is sequence
    del sequences[index]
