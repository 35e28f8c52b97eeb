"""Sequences' lists of pages, kept on a device: a step copies only new pages there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from ..plan import INT32_BYTES, Int32s, SequencePlan, unpacked


class PageTables:
    """A table for each sequence of a step, all in one tensor that never moves: `pages`, int32, one after the other.

    A sequence keeps its table until another one needs it. What lies beyond its last page is any valid page.
    """

    def __init__(self, num_sequences: int, most_pages: int, device: torch.device) -> None:
        """`num_sequences`: the most of a step; `most_pages`: of a sequence."""
        self.num_sequences, self.most_pages = num_sequences, most_pages
        self.pages = torch.zeros(num_sequences * most_pages, dtype=torch.int32, device=device)
        self._known: dict[int, tuple[int, Int32s]] = {}  # by sequence id: where its table begins, and its pages there
        self._free = [table * most_pages for table in range(num_sequences - 1, -1, -1)]

    def update(self, sequences: Sequence[SequencePlan]) -> tuple[list[int], array[int], array[int]]:
        """The start of each table, and what must be written: indices in `pages`, and the pages for them.

        The caller writes these after all earlier steps and before the step of these sequences.
        """
        places, pages, starts = array("q"), array("i"), []
        for sequence in sequences:
            start, known = self._known.get(sequence.sequence_id) or (self._take(sequences), b"")
            if known is not sequence.pages:
                kept = len(known) if sequence.pages.startswith(known) else 0
                new = unpacked(sequence.pages[kept:])
                first = start + kept // INT32_BYTES
                assert kept // INT32_BYTES + len(new) <= self.most_pages, "a sequence has more pages than a table"
                places.extend(range(first, first + len(new)))
                pages.extend(new)
                self._known[sequence.sequence_id] = (start, sequence.pages)
            starts.append(start)
        return starts, places, pages

    def _take(self, sequences: Sequence[SequencePlan]) -> int:
        """A table that none of these sequences has."""
        if not self._free:
            here = {sequence.sequence_id for sequence in sequences}
            for sequence_id in self._known.keys() - here:
                self._free.append(self._known.pop(sequence_id)[0])
        return self._free.pop()

    def check_integrity(self) -> None:
        """Raises AssertionError if two sequences share a table, or one holds other pages than is known."""
        taken = [start for start, _ in self._known.values()]
        assert sorted([*taken, *self._free]) == list(range(0, len(self.pages), self.most_pages))
        content = self.pages.tolist()
        for start, known in self._known.values():
            pages = unpacked(known).tolist()
            assert content[start : start + len(pages)] == pages, "a table on the device is behind"
