"""Which adapters a gang's sequences ask for, under the names that clients give them."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..wire.messages import SequenceRequest

_MAX_NAMES: Final = 4096  # of adapters that were requested last


class RequestedAdapters:
    """A request costs a few dictionary steps here, and a token nothing. Belongs to one event loop."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by digest, the one that was requested last comes last
        self.ranks: dict[str, int] = {}  # the largest of each adapter that has a name here, by digest
        self.num_open: Counter[str] = Counter()  # unfinished sequences, by digest
        self._digests: dict[int, str] = {}  # of unfinished sequences

    def copy(self) -> RequestedAdapters:
        """Names and numbers of this moment, for another thread to read."""
        copied = RequestedAdapters()
        copied.names, copied.ranks = dict(self.names), dict(self.ranks)
        copied.num_open = Counter(self.num_open)
        return copied

    def begin(self, sequence_id: int, request: SequenceRequest) -> None:
        if request.adapter is None:
            return
        digest = request.adapter.digest
        self._digests[sequence_id] = digest
        self.num_open[digest] += 1
        if request.adapter_name:
            self.names.pop(digest, None)
            self.names[digest] = request.adapter_name
            self.ranks[digest] = max(request.adapter.module_ranks.values(), default=0)
            if len(self.names) > _MAX_NAMES:
                oldest = next(iter(self.names))
                del self.names[oldest], self.ranks[oldest]

    def end(self, sequence_id: int) -> None:
        """No-op for a sequence that has ended, or that needs no adapter."""
        digest = self._digests.pop(sequence_id, None)
        if digest is not None:
            self.num_open[digest] -= 1
            if not self.num_open[digest]:
                del self.num_open[digest]
