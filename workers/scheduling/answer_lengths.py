"""How long answers get: a life table, learnt from those that ended and from those that still go on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
        self._left = [0.0] * NUM_BUCKETS  # answers that went on to the next bucket
        self._num_ends = 0
        starts = np.array(STARTS, float)
        self._prior = 1 - np.exp(-np.diff(starts) / np.maximum(starts[:-1], _PRIOR_TOKENS))

    def leave(self, first: int, last: int) -> None:
        """A running answer grew out of the buckets `first` up to but not including `last`."""
        for bucket in range(first, last):
            self._left[bucket] += 1

    def end(self, bucket: int) -> None:
        """An answer ended by itself in this bucket."""
        self._ended[bucket] += 1
        self._num_ends += 1
        if self._num_ends >= _MAX_ENDS:
            self._ended = [number / 2 for number in self._ended]
            self._left = [number / 2 for number in self._left]
            self._num_ends //= 2

    def reach(self) -> NDArray[np.float64]:
        """The expected share of answers that reach the start of each bucket, and the end of the last one."""
        ended, left = np.array(self._ended), np.array(self._left)
        ends = (ended + _PRIOR_WEIGHT * self._prior) / (ended + left + _PRIOR_WEIGHT)
        return np.concatenate(([1.0], np.cumprod(1 - ends)))
