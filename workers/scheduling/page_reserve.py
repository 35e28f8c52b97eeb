"""How many pages stay free for the sequences that run, when another one wants to start.

If prompts fill the pool to its last page, sequences that grow must preempt others, which are computed again. LightLLM's
Past-Future scheduler (arXiv 2507.10150) predicts what running sequences will need from the lengths of past answers; so
does this, by groups of sequences instead of one by one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..window_pages import FullLayers, pages_for
from .growing_sequence import GrowingSequence

# How long answers get: a life table, learnt from those that ended and from those that still go on.

_WIDTH = 16  # tokens of the first buckets
_PER_OCTAVE = 4  # buckets from 64 tokens on: each is at most a quarter as wide as its start
NUM_BUCKETS = 64  # up to 2 million tokens
_PRIOR_TOKENS = 256  # expected rest of an answer while nothing is known, or its length so far if that is more
_PRIOR_WEIGHT = 1.0  # answers that this counts for in each bucket
_MAX_ENDS = 1024  # answers, after which all counts are halved: older ones matter less and less


def bucket_of(num_tokens: int) -> int:
    """The bucket of an answer that has this many tokens so far."""
    if num_tokens < _PER_OCTAVE * _WIDTH:
        return num_tokens // _WIDTH
    octave = num_tokens.bit_length() - 1
    return min(NUM_BUCKETS - 1, (octave - 5) * _PER_OCTAVE + (num_tokens >> (octave - 2)) % _PER_OCTAVE)


def _start(bucket: int) -> int:
    if bucket < _PER_OCTAVE:
        return bucket * _WIDTH
    octave, part = divmod(bucket, _PER_OCTAVE)
    return (_PER_OCTAVE + part) << (octave + 3)


STARTS = tuple(_start(bucket) for bucket in range(NUM_BUCKETS + 1))  # tokens; bucket b is STARTS[b] to STARTS[b + 1]


class AnswerLengths:
    """The share of answers that reach a length, by the shares of each bucket that ended in it (Kaplan and Meier 1958).

    An answer that was cut off by a limit or cancelled counts in the buckets that it has left, so it does not make
    answers look shorter than they are; nor do running ones, of which the short ones end first.
    """

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_BUCKETS
        self._survivors = [0.0] * NUM_BUCKETS  # answers that went on to the next bucket
        self._num_ends = 0
        starts = np.array(STARTS, float)
        self._prior = 1 - np.exp(-np.diff(starts) / np.maximum(starts[:-1], _PRIOR_TOKENS))

    def leave(self, first: int, last: int) -> None:
        """A running answer grew out of the buckets `first` up to but not including `last`."""
        for bucket in range(first, last):
            self._survivors[bucket] += 1

    def end(self, bucket: int) -> None:
        """An answer ended by itself in this bucket."""
        self._ended[bucket] += 1
        self._num_ends += 1
        if self._num_ends >= _MAX_ENDS:
            self._ended = [number / 2 for number in self._ended]
            self._survivors = [number / 2 for number in self._survivors]
            self._num_ends //= 2

    def reach(self) -> NDArray[np.float64]:
        """The expected share of answers that reach the start of each bucket, and the end of the last one."""
        ended, survivors = np.array(self._ended), np.array(self._survivors)
        ends = (ended + _PRIOR_WEIGHT * self._prior) / (ended + survivors + _PRIOR_WEIGHT)
        return np.concatenate(([1.0], np.cumprod(1 - ends)))


_MARGIN = 0.3  # of the deviation of what sequences need, if each ends at a time of its own
_MAX_MARGIN = 0.05  # of the pool
_LIMITS_PER_OCTAVE = 32  # limits of answers are rounded up to these
_FIRST_ROWS = 8  # groups for which there is room at first
_REFRESH_ENDS = 16  # runs that end, by themselves or not, before the table of survival is computed again

_Floats = NDArray[np.float64]
_AHEAD = np.array([8 * 2 ** (i / 2) for i in range(24)])  # steps, in which a sequence grows by a token each
_MIDDLES = (np.array(STARTS[:-1], float) + np.array(STARTS[1:], float)) / 2  # tokens, by bucket


def survival(reach: _Floats) -> _Floats:
    """[buckets, steps ahead] the share of the sequences in a bucket that have not ended after so many steps.

    `reach`: the share of answers that reach the start of each bucket.
    """
    later = np.interp(_MIDDLES[:, None] + _AHEAD, STARTS, reach)
    alive: _Floats = later / np.maximum(np.interp(_MIDDLES, STARTS, reach), 1e-12)[:, None]
    return alive


def growth(num_sequences: _Floats, num_pages: _Floats, alive: _Floats, block_size: int) -> _Floats:
    """[steps ahead] how many pages more than now sequences are expected to hold; below 0: they give pages back.

    `num_sequences`, `num_pages`: [buckets] the sequences that grow, and the pages that all hold now. `alive`: [buckets,
    steps ahead] the share of them that has not ended.
    """
    pages, sequences = np.stack((num_pages, num_sequences)) @ alive
    grown: _Floats = pages - num_pages.sum() + sequences * (_AHEAD / block_size)
    return grown


def margin(sum_squares: float, num_pool_pages: int) -> int:
    """Pages that stay free in any case, since sequences need more or less than expected.

    `sum_squares`: of the pages that each running sequence holds. What ends and grows by chance deviates by the root of
    this, so it is a smaller part of a larger pool: 5 % of one for 64 sequences, 3 % for 192.
    """
    return int(min(_MARGIN * math.sqrt(sum_squares), _MAX_MARGIN * num_pool_pages))


@dataclass(eq=False, slots=True)
class _Group:
    """Running sequences whose answers have about the same limit."""

    row: int  # of the arrays that hold all groups
    num_members: int = 0


@dataclass(eq=False, slots=True)
class _Place:
    """Where a running sequence is counted."""

    limit: int
    group: _Group
    bucket: int
    bucket_ends: int  # tokens of the sequence, prompt and answer
    num_pages: int  # that only it holds, as far as known
    num_to_come: int  # pages that it takes more if its answer reaches its limit
    grows: float  # pages for each page of its tokens; less than 1: it gives others back


class PageReserve:
    """Predicts how many pages running sequences will need. An update takes constant time, however many run."""

    def __init__(
        self, num_pages: int, block_size: int, window: int | None = None, full_layers: FullLayers | None = None
    ) -> None:
        """`num_pages`: of the pool. `window`: tokens from which on a sequence gives pages back; None: never."""
        self._num_pool_pages, self._block_size, self._window = num_pages, block_size, window
        # Pages that it takes from then on for each page of tokens, rounded so that sums are exact.
        self._late_growth = 0.0 if full_layers is None else round(1024 / full_layers.num_blocks) / 1024
        self._lengths = AnswerLengths()
        self._survival = survival(self._lengths.reach())
        self._num_ends = 0  # runs, since this was computed
        self._groups: dict[int, _Group] = {}  # by limit of the answer, rounded up
        # Of all groups, by row and by the bucket of the answers' lengths so far: sequences that grow, pages, and
        # [rows, buckets, steps ahead] the share that has not ended. Rows without a group are 0.
        self._num_sequences, self._num_pages = np.zeros((2, _FIRST_ROWS, NUM_BUCKETS))
        self._alive = np.zeros((_FIRST_ROWS, NUM_BUCKETS, len(_AHEAD)))
        self._free_rows: list[int] = [*range(_FIRST_ROWS)]
        self._places: dict[int, _Place] = {}  # by sequence id
        self._sum_squares = 0  # of the pages of each running sequence
        self._num_to_come = 0  # pages of all, if all answers reach their limits
        self._growth: _Floats | None = None  # of all running sequences; None: not computed since they changed

    @property
    def min_pages(self) -> int:
        """Pages to be left free, whatever starts."""
        return min(margin(self._sum_squares, self._num_pool_pages), self._num_to_come)

    def num_pages(self, sequence: GrowingSequence, num_pages: int) -> int:
        """Pages to be left free when a sequence starts that takes `num_pages`; 0 where no sequence runs."""
        if not self._places:
            return 0
        min_pages = margin(self._sum_squares, self._num_pool_pages)
        num_filled = pages_for(len(sequence.token_ids), self._block_size)
        num_to_come = self._num_to_come + self._pages_to_come(sequence, num_filled)
        if num_to_come <= min_pages:
            return num_to_come  # enough even if all answers reach their limits
        return min(max(min_pages, self.growth_with(sequence, num_pages)), num_to_come)

    def growth_with(self, sequence: GrowingSequence, num_pages: int) -> int:
        """Pages more than now that running sequences are expected to need, with one that starts on `num_pages`."""
        if self._num_ends >= _REFRESH_ENDS:
            self._refresh()
        if self._growth is None:
            numbers = self._num_sequences.reshape(-1), self._num_pages.reshape(-1)
            self._growth = growth(*numbers, self._alive.reshape(-1, len(_AHEAD)), self._block_size)
        limit, bucket = _limit(sequence), bucket_of(_num_generated(sequence))
        group = self._groups.get(limit)
        alive = (self._alive_at(limit) if group is None else self._alive[group.row])[bucket]
        grown = self._grows(sequence) * _AHEAD / self._block_size
        new_growth = alive * (num_pages + grown) - num_pages
        return math.ceil(float((self._growth + new_growth).max()))

    def add(self, sequence: GrowingSequence) -> None:
        """The sequence starts; it shares its first `num_kept_pages` pages with others."""
        limit = _limit(sequence)
        group = self._groups.get(limit)
        if group is None:
            group = self._groups[limit] = _Group(self._take_row())
            self._alive[group.row] = self._alive_at(limit)
        bucket, num_pages = bucket_of(_num_generated(sequence)), len(sequence.pages) - sequence.num_kept_pages
        ends, grows = sequence.num_prompt_tokens + STARTS[bucket + 1], self._grows(sequence)
        num_to_come = self._pages_to_come(sequence, len(sequence.pages))
        self._num_to_come += num_to_come
        self._places[sequence.sequence_id] = _Place(limit, group, bucket, ends, num_pages, num_to_come, grows)
        group.num_members += 1
        self._sum_squares += num_pages**2
        self._count(group, bucket, grows, num_pages)

    def grow(self, sequence: GrowingSequence, num_pages: int = 1) -> None:
        """The running sequence takes more pages."""
        place = self._places[sequence.sequence_id]
        num_before = place.num_pages
        place.num_pages += num_pages
        num_came = min(num_pages, place.num_to_come)
        place.num_to_come -= num_came
        self._num_to_come -= num_came
        self._sum_squares += place.num_pages**2 - num_before**2
        if len(sequence.token_ids) < place.bucket_ends:
            self._num_pages[place.group.row, place.bucket] += num_pages
            self._growth = None
            return
        bucket = bucket_of(_num_generated(sequence))
        self._lengths.leave(place.bucket, bucket)
        self._count(place.group, place.bucket, -place.grows, -num_before)
        self._count(place.group, bucket, place.grows, place.num_pages)
        place.bucket, place.bucket_ends = bucket, sequence.num_prompt_tokens + STARTS[bucket + 1]

    def shrink(self, sequence: GrowingSequence) -> None:
        """The running sequence has given pages back: from now on nearly as many as it takes."""
        place = self._places[sequence.sequence_id]
        num_pages = min(place.num_pages, sequence.num_held_pages)
        self._sum_squares += num_pages**2 - place.num_pages**2
        self._count(place.group, place.bucket, self._late_growth - place.grows, num_pages - place.num_pages)
        place.num_pages, place.grows = num_pages, self._late_growth

    def remove(self, sequence: GrowingSequence) -> None:
        """The sequence does not run any more."""
        place = self._places.pop(sequence.sequence_id)
        self._lengths.leave(place.bucket, bucket_of(_num_generated(sequence)))
        self._sum_squares -= place.num_pages**2
        self._num_to_come -= place.num_to_come
        self._count(place.group, place.bucket, -place.grows, -place.num_pages)
        place.group.num_members -= 1
        if not place.group.num_members:
            del self._groups[place.limit]
            self._alive[place.group.row] = 0.0
            self._free_rows.append(place.group.row)
        self._num_ends += 1

    def observe_end(self, sequence: GrowingSequence) -> None:
        """The sequence's answer ended by itself."""
        self._lengths.end(bucket_of(_num_generated(sequence)))

    def check_integrity(self, running: Collection[GrowingSequence]) -> None:
        """Raises AssertionError unless the running sequences, and no others, are counted with what they hold."""
        places = self._places
        assert places.keys() == {sequence.sequence_id for sequence in running}, "a sequence is not counted, or left"
        assert all(places[s.sequence_id].num_pages <= len(s.pages) for s in running), "pages are miscounted"
        assert self._sum_squares == sum(place.num_pages**2 for place in places.values())
        assert self._num_to_come == sum(place.num_to_come for place in places.values())
        num_members = dict.fromkeys(self._groups, 0)
        num_sequences, num_pages = np.zeros_like(self._num_sequences), np.zeros_like(self._num_pages)
        for place in places.values():
            assert self._groups[place.limit] is place.group
            num_members[place.limit] += 1
            num_sequences[place.group.row, place.bucket] += place.grows
            num_pages[place.group.row, place.bucket] += place.num_pages
        assert num_members == {limit: group.num_members for limit, group in self._groups.items()}
        assert all(num_members.values()), "a group has no members"
        assert (self._num_sequences == num_sequences).all() and (self._num_pages == num_pages).all()
        rows = [group.row for group in self._groups.values()]
        assert sorted([*rows, *self._free_rows]) == [*range(len(self._alive))], "a row is lost, or of two groups"
        assert not self._alive[self._free_rows].any()

    def _refresh(self) -> None:
        self._num_ends, self._growth = 0, None
        self._survival = survival(self._lengths.reach())
        rows = [group.row for group in self._groups.values()]
        self._alive[rows] = self._alive_at(np.array([*self._groups])[:, None, None])

    def _pages_to_come(self, sequence: GrowingSequence, num_pages: int) -> int:
        """Pages that a sequence with `num_pages` takes more if its answer reaches its limit."""
        return max(0, pages_for(sequence.max_length, self._block_size) - num_pages) * sequence.num_places

    def _grows(self, sequence: GrowingSequence) -> float:
        late = self._window is not None and len(sequence.token_ids) >= self._window
        return sequence.num_places * (self._late_growth if late else 1.0)

    def _take_row(self) -> int:
        if not self._free_rows:
            num_rows = len(self._alive)
            self._free_rows = [*range(num_rows, 2 * num_rows)]
            more = np.zeros_like(self._num_pages)
            self._num_sequences, self._num_pages = (
                np.concatenate((each, more)) for each in (self._num_sequences, self._num_pages)
            )
            self._alive = np.concatenate((self._alive, np.zeros_like(self._alive)))
        return self._free_rows.pop()

    def _alive_at(self, limit: int | NDArray[np.int_]) -> _Floats:
        """Of answers with this limit, or with several."""
        alive: _Floats = self._survival * (_MIDDLES[:, None] + _AHEAD < limit)
        return alive

    def _count(self, group: _Group, bucket: int, num_sequences: float, num_pages: int) -> None:
        self._num_sequences[group.row, bucket] += num_sequences
        self._num_pages[group.row, bucket] += num_pages
        self._growth = None


def _num_generated(sequence: GrowingSequence) -> int:
    return len(sequence.token_ids) - sequence.num_prompt_tokens


def _limit(sequence: GrowingSequence) -> int:
    """The most tokens of its answer, rounded up."""
    max_tokens = max(sequence.max_length - sequence.num_prompt_tokens, 1)
    step = max(1, 1 << max(0, max_tokens.bit_length() - _LIMITS_PER_OCTAVE.bit_length()))
    return -(-max_tokens // step) * step
