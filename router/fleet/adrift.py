"""Sequences between the loss of a connection and the news whether their gang is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .open_sequence import OpenSequence

RETURN_S = 0.5  # how long sequences wait for a leader that may be back at once


class Castaway(NamedTuple):
    sequence: OpenSequence
    had_arrived: bool  # at the leader, as far as it has told


class Adrift:
    """Those that a leader may have kept. `on_lost` gets them, and the reason, when it is not back in time."""

    def __init__(self, on_lost: Callable[[list[Castaway], str], None]) -> None:
        self._on_lost = on_lost
        self._waiting: list[Castaway] = []
        self._reason = ""
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, castaways: list[Castaway], reason: str) -> None:
        """These wait from now on; nobody does so far."""
        assert not self._waiting
        if not castaways:
            return
        for castaway in castaways:
            castaway.sequence.on_cancel = None
        self._waiting, self._reason = castaways, reason
        self._timer = asyncio.get_running_loop().call_later(RETURN_S, self.give_up)

    def take(self, orphans: Iterable[str]) -> list[OpenSequence]:
        """The leader is back and tells that it holds these keys: whoever has one of them, and goes on there now.

        The others wait on: the leader may not have noticed yet that they lost their connection.
        """
        if not self._waiting:
            return []
        keys = set(orphans)
        back = [one.sequence for one in self._waiting if one.sequence.request.key in keys]
        self._waiting = [one for one in self._waiting if one.sequence.request.key not in keys]
        return [sequence for sequence in back if not sequence.closed]

    def give_up(self) -> None:
        """The leader is not back: all are lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lost, self._waiting = self._waiting, []
        if lost:
            self._on_lost(lost, self._reason)
