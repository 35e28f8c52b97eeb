"""Log-probabilities of many tokens in little memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

import msgspec

from .messages import TokenLogprobs

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(list[TokenLogprobs])


class KeptLogprobs:
    """Rows of `TokenLogprobs`, in order, as the bytes that they take in a frame: a sixth of what the objects take."""

    __slots__ = ("_bytes", "_ends", "num_values")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("Q")  # of each row
        self.num_values = 0  # log-probabilities, and ids of tokens beside them

    def __len__(self) -> int:
        return len(self._ends)

    def extend(self, rows: Iterable[TokenLogprobs]) -> None:
        data = self._bytes
        for row in rows:
            _ENCODER.encode_into(row, data, -1)
            self._ends.append(len(data))
            self.num_values += 1 + 2 * len(row.top_ids)

    def rows(self, start: int, end: int) -> list[TokenLogprobs]:
        """The rows from `start` on, to before `end`."""
        begin = self._ends[start - 1] if start else 0
        num_rows, data = end - start, self._bytes[begin : self._ends[end - 1] if end else 0]
        return _DECODER.decode(b"\xdd" + num_rows.to_bytes(4) + data)  # msgpack's head of an array

    def copy_from(self, start: int) -> KeptLogprobs:
        """The rows from `start` on."""
        copy, begin = KeptLogprobs(), self._ends[start - 1] if start else 0
        copy._bytes = self._bytes[begin:]
        copy._ends = array("Q", [end - begin for end in self._ends[start:]])
        copy.num_values = self.num_values
        return copy

    def num_bytes(self, start: int) -> int:
        """Of the rows from `start` on."""
        return len(self._bytes) - (self._ends[start - 1] if start else 0)

    def num_fitting(self, start: int, num_bytes: int, more_bytes: int) -> int:
        """How many rows from `start` on fit into `num_bytes`, if each takes `more_bytes` beyond its own."""
        begin = self._ends[start - 1] if start else 0
        rows = range(start, len(self._ends))
        return bisect_right(rows, num_bytes, key=lambda row: self._ends[row] - begin + (row + 1 - start) * more_bytes)
