"""Updates that were not sent to one router yet, and the part of them that the next frame holds.

A frame holds at most about half a megabyte: short updates first, then a piece of each long one in turn. So neither a
stream that is resumed after many tokens, nor a router that was slow for a moment, delays other sequences' tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..wire.messages import SequenceUpdate
from ..wire.sequence_usage import SequenceUsage
from ..wire.unread_update import UnreadUpdate, update_bytes

FRAME_BYTES: Final = 1 << 19  # of a frame's updates
PIECE_BYTES: Final = FRAME_BYTES // 16  # of one sequence in a frame, at most
_LONG_BYTES: Final = FRAME_BYTES // 2  # of a frame, reserved for pieces while there are any
_MAX_PLAIN: Final = 4096  # updates of one token and nothing else: less than 112 bytes each
MAX_UNREAD_VALUES: Final = 4 << 20  # tokens and log-probabilities that came while earlier ones were not yet sent
_MAX_LEFT_VALUES: Final = 2 * MAX_UNREAD_VALUES  # the same, of sequences that have ended


def tenants_to_give_back(num_values: Mapping[str, int], num_left_values: int) -> set[str]:
    """The tenants whose sequences are given back because their router does not read: a pure policy.

    `num_values`: unread values by tenant. The tenants with the most are chosen, until the others hold at most half.
    All are, if sequences that were given back have left too many unread values (`num_left_values`).
    """
    if num_left_values > _MAX_LEFT_VALUES:
        return {*num_values}
    left, chosen = sum(num_values.values()), set[str]()
    most = left // 2
    for tenant in sorted(num_values, key=lambda tenant: num_values[tenant], reverse=True):
        if left <= most:
            break
        chosen.add(tenant)
        left -= num_values[tenant]
    return chosen


class UnsentUpdates:
    """Unsent updates by the router's ids of sequences. Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_id: dict[int, SequenceUpdate | UnreadUpdate] = {}
        self._is_plain = True  # each is a token and nothing else
        self._ended: set[int] = set()  # sequences that add no more, though their updates may not be sent
        self._num_unread_values = 0  # of sequences that have not ended
        self.num_left_values = 0  # of sequences that have ended

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_id

    @property
    def is_overfull(self) -> bool:
        """Whether so much is unread that sequences must be given back."""
        return self._num_unread_values > MAX_UNREAD_VALUES

    @property
    def num_values(self) -> dict[int, int]:
        """Tokens and log-probabilities that came while earlier ones were not sent, of sequences that have not ended."""
        unread = ((key, one) for key, one in self._by_id.items() if key not in self._ended)
        return {key: one.num_added_values for key, one in unread if isinstance(one, UnreadUpdate)}

    def add(self, update: SequenceUpdate) -> None:
        sequence_id = update.sequence_id
        before = self._by_id.get(sequence_id)
        if before is None:
            self._by_id[sequence_id] = update
            if (
                update.logprobs
                or update.error
                or update.prompt_scores
                or update.embedding
                or len(update.token_ids) > 1
                or update.beam_rounds
            ):
                self._is_plain = False
        else:
            self._merge(before, update)

    def begin(self, sequence_id: int, unread: UnreadUpdate) -> None:
        """Adds a sequence without unsent updates, with what it has generated before."""
        assert sequence_id not in self._by_id
        self._by_id[sequence_id] = unread
        self._is_plain = False

    def drop(self, sequence_id: int) -> SequenceUsage | None:
        """The router has cancelled the sequence. Returns the newest usage that is dropped, if there is any."""
        unsent = self._by_id.pop(sequence_id, None)
        if isinstance(unsent, UnreadUpdate) and sequence_id in self._ended:
            self.num_left_values -= unsent.num_added_values
        elif isinstance(unsent, UnreadUpdate):
            self._num_unread_values -= unsent.num_added_values
        self._ended.discard(sequence_id)
        return None if unsent is None else unsent.usage

    def end(self, sequence_id: int) -> None:
        """The sequence adds no more; its unsent updates are still sent."""
        unsent = self._by_id.get(sequence_id)
        if unsent is None or sequence_id in self._ended:
            return
        self._ended.add(sequence_id)
        if isinstance(unsent, UnreadUpdate):
            self._num_unread_values -= unsent.num_added_values
            self.num_left_values += unsent.num_added_values

    def take(self) -> list[SequenceUpdate]:
        """Removes and returns the updates of the next frame."""
        if self._is_plain and len(self._by_id) <= _MAX_PLAIN:
            plain, self._by_id = self._by_id, {}
            self._ended.clear()
            return [*plain.values()]  # type: ignore[list-item]  # what is unread is not plain
        taken = self._take_parts()
        self._is_plain = not self._by_id
        self._ended &= self._by_id.keys()
        self._count()
        return taken

    def _count(self) -> None:
        unread = [(key in self._ended, one) for key, one in self._by_id.items() if isinstance(one, UnreadUpdate)]
        self._num_unread_values = sum(one.num_added_values for has_ended, one in unread if not has_ended)
        self.num_left_values = sum(one.num_added_values for has_ended, one in unread if has_ended)

    def _merge(self, before: SequenceUpdate | UnreadUpdate, update: SequenceUpdate) -> None:
        if not isinstance(before, UnreadUpdate):
            before = self._by_id[update.sequence_id] = UnreadUpdate(before)
            self._is_plain = False
        num_values = before.num_added_values
        before.add(update)
        self._num_unread_values += before.num_added_values - num_values

    def _take_parts(self) -> list[SequenceUpdate]:
        taken: list[SequenceUpdate] = []
        long: list[int] = []
        num_bytes = 0
        for sequence_id, unsent in [*self._by_id.items()]:
            if isinstance(unsent, UnreadUpdate):
                if unsent.max_bytes > PIECE_BYTES:
                    long.append(sequence_id)
                    continue
                update, _ = unsent.take(PIECE_BYTES)
            elif update_bytes(unsent) > PIECE_BYTES and (len(unsent.token_ids) > 1 or unsent.prompt_scores):
                self._by_id[sequence_id] = UnreadUpdate(unsent)
                long.append(sequence_id)
                continue
            else:
                update = unsent
            num_bytes += update_bytes(update)
            taken.append(update)
            del self._by_id[sequence_id]
            if num_bytes > FRAME_BYTES - _LONG_BYTES:
                break
        for sequence_id in long:
            if num_bytes > FRAME_BYTES - PIECE_BYTES:
                break
            unsent = self._by_id.pop(sequence_id)
            assert isinstance(unsent, UnreadUpdate)
            piece, is_all = unsent.take(PIECE_BYTES)
            num_bytes += update_bytes(piece)
            taken.append(piece)
            if not is_all:
                self._by_id[sequence_id] = unsent  # behind the others: its turn comes again after theirs
        return taken
