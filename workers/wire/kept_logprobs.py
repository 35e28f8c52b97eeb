"""Log-probabilities of many tokens in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .messages import TokenLogprobs


class KeptLogprobs:
    """Rows of `TokenLogprobs`, in order. 8 bytes for each value and its token, instead of some 80 as objects.

    Values are kept as float32, as they were computed.
    """

    __slots__ = ("_chosen", "_ends", "_top_ids", "_top_logprobs")

    def __init__(self) -> None:
        self._chosen = array("f")
        self._top_ids = array("I")  # of all rows
        self._top_logprobs = array("f")
        self._ends = array("I")  # where the most likely tokens of each row end

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def num_values(self) -> int:
        """Log-probabilities, and ids of tokens beside them."""
        return len(self._chosen) + 2 * len(self._top_ids)

    def extend(self, rows: Iterable[TokenLogprobs]) -> None:
        for row in rows:
            self._chosen.append(row.chosen)
            self._top_ids.extend(row.top_ids)
            self._top_logprobs.extend(row.top_logprobs)
            self._ends.append(len(self._top_ids))

    def num_tops(self, start: int) -> int:
        """Likely tokens of the rows from `start` on, together."""
        return len(self._top_ids) - (self._ends[start - 1] if start else 0)

    def rows(self, start: int, end: int) -> list[TokenLogprobs]:
        """The rows from `start` to before `end`, both within what is there."""
        ends, ids, values = self._ends, self._top_ids, self._top_logprobs
        rows, begin = [], ends[start - 1] if start else 0
        for index in range(start, end):
            stop = ends[index]
            rows.append(TokenLogprobs(self._chosen[index], ids[begin:stop].tolist(), values[begin:stop].tolist()))
            begin = stop
        return rows

    def copy_from(self, start: int) -> KeptLogprobs:
        """The rows from `start` on."""
        copy, begin = KeptLogprobs(), self._ends[start - 1] if start else 0
        copy._chosen = self._chosen[start:]
        copy._top_ids, copy._top_logprobs = self._top_ids[begin:], self._top_logprobs[begin:]
        copy._ends = array("I", [end - begin for end in self._ends[start:]])
        return copy

    def num_fitting(self, start: int, end: int, num_bytes: int, row_bytes: int, value_bytes: int) -> int:
        """How many rows from `start` to before `end` fit: each takes `row_bytes`, each likely token `value_bytes`."""
        begin = self._ends[start - 1] if start else 0
        for index in range(start, end):
            if (index + 1 - start) * row_bytes + (self._ends[index] - begin) * value_bytes > num_bytes:
                return index - start
        return end - start
