"""Sequences whose connection broke, until it is known whether their leader is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .open_sequence import OpenSequence

RECONNECT_WAIT_S = 0.5  # how long sequences wait for their leader


class CutOffSequence(NamedTuple):
    """A sequence without a place, since the connection to its leader has ended."""

    sequence: OpenSequence
    had_arrived: bool  # at the leader, as far as the leader has confirmed


class AwaitingReconnect:
    """A `SequencePlace` for the sequences that one leader may have kept. Belongs to one event loop."""

    def __init__(self, on_lost: Callable[[list[CutOffSequence], str], None]) -> None:
        """`on_lost` gets the sequences, and the reason, if the leader does not come back in time."""
        self._on_lost = on_lost
        self._waiting: dict[OpenSequence, CutOffSequence] = {}  # in the order of their submission
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, cut_off: list[CutOffSequence], reason: str) -> None:
        """Adds these sequences; no other sequence may be waiting here."""
        assert not self._waiting
        if not cut_off:
            return
        for one in cut_off:
            one.sequence.move(None, self)
        self._waiting, self._reason = {one.sequence: one for one in cut_off}, reason
        self._timer = asyncio.get_running_loop().call_later(RECONNECT_WAIT_S, self.give_up)

    def take(self, orphans: Iterable[str]) -> list[OpenSequence]:
        """Removes the sequences with these keys, which the leader, now back, reports as held."""
        keys = set(orphans)
        found = [sequence for sequence in self._waiting if sequence.request.key in keys]
        for sequence in found:
            del self._waiting[sequence]
            sequence.move(self, None)
        return found

    def give_up(self) -> None:
        """The leader is not back: all sequences here are lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lost, self._waiting = self._waiting, {}
        for sequence in lost:
            sequence.move(self, None)
        if lost:
            self._on_lost([*lost.values()], self._reason)

    def cancel(self, sequence: OpenSequence) -> None:
        del self._waiting[sequence]
