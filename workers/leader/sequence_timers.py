"""The time that sequences have at their leader, by its own clock: to begin, and in all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..wire.messages import SequenceRequest, SequenceUpdate
from .queue_limit import QueueLimit


@dataclass(eq=False, slots=True)
class _Timers:
    wait: asyncio.TimerHandle | None
    whole: asyncio.TimerHandle | None


class SequenceTimers:
    """Follows sequences from their arrival to their end, by the engine's id, and keeps the waiting room.

    Belongs to the event loop that runs when sequences start.
    """

    def __init__(self, room: QueueLimit, on_waited: Callable[[int], None], on_timeout: Callable[[int], None]) -> None:
        """`on_waited`: a sequence has no token yet, and its time to wait is over. `on_timeout`: all of its time is."""
        self._room, self._on_waited, self._on_timeout = room, on_waited, on_timeout
        self._timers: dict[int, _Timers] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def start(self, engine_id: int, request: SequenceRequest) -> None:
        loop = asyncio.get_running_loop()
        self._room.enter(engine_id, len(request.prompt_token_ids), loop.time())
        if request.wait_s is not None or request.timeout_s is not None:
            self._timers[engine_id] = _Timers(
                None if request.wait_s is None else loop.call_later(request.wait_s, self._on_waited, engine_id),
                None if request.timeout_s is None else loop.call_later(request.timeout_s, self._on_timeout, engine_id),
            )

    def follow(self, update: SequenceUpdate) -> None:
        """What the engine tells of a sequence: it has a token, or has ended."""
        if update.finish_reason is not None or update.error is not None:
            self.end(update.sequence_id)
        elif update.token_ids:
            self._room.leave(update.sequence_id)
            timers = self._timers.get(update.sequence_id)
            if timers is not None and timers.wait is not None:
                timers.wait.cancel()
                timers.wait = None

    def end(self, engine_id: int) -> None:
        """It has ended, or nobody wants it any more. Unknown ids are ignored."""
        self._room.leave(engine_id)
        timers = self._timers.pop(engine_id, None)
        if timers is not None:
            for timer in (timers.wait, timers.whole):
                if timer is not None:
                    timer.cancel()
