"""How long sequences may wait at their leader, and how long they may take in all, by the leader's own clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..wire.messages import SequenceRequest, SequenceUpdate
from .queue_limit import QueueLimit


@dataclass(eq=False, slots=True)
class _Timers:
    wait: asyncio.TimerHandle | None
    total: asyncio.TimerHandle | None


class SequenceTimers:
    """Follows sequences from their arrival to their end, by the engine's id, and keeps the `QueueLimit` informed.

    Belongs to the event loop that runs when sequences start.
    """

    def __init__(
        self, queue_limit: QueueLimit, on_wait_end: Callable[[int], None], on_timeout: Callable[[int], None]
    ) -> None:
        """`on_wait_end`: a sequence has no token when its `wait_s` is over. `on_timeout`: its `timeout_s` is over."""
        self._queue_limit, self._on_wait_end, self._on_timeout = queue_limit, on_wait_end, on_timeout
        self._timers: dict[int, _Timers] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def start(self, engine_id: int, request: SequenceRequest) -> None:
        loop = asyncio.get_running_loop()
        may_go = not (request.has_begun or request.was_admitted or request.generated_token_ids)
        num_tokens = len(request.prompt_token_ids)
        self._queue_limit.enter(engine_id, request.tenant, num_tokens, loop.time(), request.weight, may_go)
        if request.wait_s is not None or request.timeout_s is not None:
            self._timers[engine_id] = _Timers(
                None if request.wait_s is None else loop.call_later(request.wait_s, self._on_wait_end, engine_id),
                None if request.timeout_s is None else loop.call_later(request.timeout_s, self._on_timeout, engine_id),
            )

    def follow(self, update: SequenceUpdate) -> None:
        """Takes in an update of the engine: the sequence has a token, or has ended."""
        if update.finish_reason is not None or update.error is not None:
            self.end(update.sequence_id)
        elif update.token_ids:
            self._queue_limit.leave(update.sequence_id)
            timers = self._timers.get(update.sequence_id)
            if timers is not None and timers.wait is not None:
                timers.wait.cancel()
                timers.wait = None

    def end(self, engine_id: int) -> None:
        """The sequence has ended or was cancelled. Unknown ids are ignored."""
        self._queue_limit.leave(engine_id)
        timers = self._timers.pop(engine_id, None)
        if timers is not None:
            for timer in (timers.wait, timers.total):
                if timer is not None:
                    timer.cancel()
