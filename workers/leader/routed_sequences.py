"""The sequences that a leader computes for its routers: which stream gets each one's updates, and when it is given up.

Routers number their sequences each for itself, so every sequence has an id of the engine's too. A sequence lives as
long as the stream that it was submitted on. One with a key outlives it: it goes on as an orphan for a while, for the
router that comes back or for another one that requests it (`sequence_journal.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from ..engine_messages import End, GiveUpWaiting
from ..wire.messages import CANCELLED, Cancel, SequenceError, SequenceRequest, SequenceUpdate, Submit
from .queue_limit import QueueLimit, RunningLimit
from .residency import RequestedAdapters
from .router_stream import RouterStream, tenants_to_give_back
from .sequence_journal import SequenceJournal
from .served_engine import LeaderConfig, ServedEngine

# A gang's log lines on single sequences: failures, and at level debug arrivals and ends.
#
# The request's id links them to the router's lines.

FAULTS: Final = frozenset({"adapter_failed", "store_unavailable", "gang_lost", "internal"})  # not the client's doing

_log = logging.getLogger(__name__)


def log_arrival(request: SequenceRequest) -> None:
    """A router has submitted it, or requested it again."""
    if _log.isEnabledFor(logging.DEBUG):
        adapter = "" if request.adapter is None else request.adapter.digest
        counts = {"prompt_tokens": len(request.prompt_token_ids), "had_tokens": len(request.generated_token_ids)}
        _log.debug("a sequence arrived", extra=_fields(request.request_id, request.tenant, adapter=adapter, **counts))


def log_end(request_id: str, tenant: str, update: SequenceUpdate) -> None:
    """Its last update is on its way to the router."""
    kind = "" if update.error is None else update.error.kind
    if kind in FAULTS:
        _log.warning("a sequence failed", extra=_fields(request_id, tenant, error=kind))
    elif _log.isEnabledFor(logging.DEBUG):
        _log.debug("a sequence ended", extra=_fields(request_id, tenant, finish=update.finish_reason, error=kind))


def _fields(request_id: str, tenant: str, **extra_fields: Any) -> dict[str, Any]:
    fields = {"request_id": request_id, "tenant": tenant, **extra_fields}
    return {"fields": {name: value for name, value in fields.items() if value not in (None, "")}}


# How long sequences may wait at their leader, and how long they may take in all, by the leader's own clock.


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


_MAX_ID = (1 << 63) - 1
_HANDED_OVER = SequenceError("handed_over", "the gang is shutting down")
_GIVEN_BACK = SequenceError("given_back", "its router reads more slowly than it computes")
_TIMEOUT = SequenceError("timeout", "its timeout passed before it was complete")
_WITHDRAWN = SequenceError("withdrawn", "its router sends it to another gang")
_DROPPED = SequenceError(
    "overloaded",
    "the gang's queue is full, and this tenant has more of it than one whose request arrived later; try again later",
    reason="tenant_full",
)
_TAKEN_OVER = SequenceError("taken_over", "the stream was resumed on another connection")


class _Listener(NamedTuple):
    """The stream that gets a sequence's updates, and the id that the sequence has there."""

    stream: RouterStream
    sequence_id: int
    request_id: str  # of the request that it belongs to, for the log
    tenant: str


class RoutedSequences:
    """Owner of `RouterStream.live`. All methods belong to one event loop."""

    def __init__(
        self,
        engine: ServedEngine,
        config: LeaderConfig,
        on_orphans: Callable[[set[str]], None],
    ) -> None:
        """`on_orphans` gets the keys of orphans that have come or gone."""
        self._engine, self._on_orphans = engine, on_orphans
        self._listeners: dict[int, _Listener] = {}  # by the engine's id; orphans have none
        self._cancelled: dict[int, _Listener] = {}  # by the engine's id, until the engine has reported the usage
        self._last_engine_id = 0
        self._journal = SequenceJournal(config)
        self._queue_limit = QueueLimit(config)
        self._running_limit = RunningLimit(config.max_tenant_running)
        self.requested_adapters = RequestedAdapters()
        self.num_ended: Counter[str] = Counter()  # by finish reason or kind of error; not of those that were cancelled
        self._timers = SequenceTimers(self._queue_limit, self._give_up_waiting, self._time_out)

    def __len__(self) -> int:
        """Unfinished sequences of all routers, without orphans."""
        return len(self._listeners)

    def change(self, config: LeaderConfig) -> None:
        """Applies another config from now on."""
        self._journal.change(config)
        self._queue_limit.change(config)
        for request in self._running_limit.change(config.max_tenant_running):
            self._engine.receive(Submit(request))

    @property
    def orphans(self) -> list[str]:
        """Keys that any router may ask for."""
        return self._journal.orphans

    @property
    def num_held(self) -> int:
        """Sequences that the engine does not know yet, because their tenants have their shares of it."""
        return self._running_limit.num_held

    @property
    def num_held_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._running_limit.num_held_tokens

    @property
    def oldest_waiting_s(self) -> float:
        """For how long the oldest sequence without a token has waited for its first one."""
        return self._queue_limit.oldest_s(_now())

    def submit(self, stream: RouterStream, request: SequenceRequest) -> None:
        """Raises ValueError for an id that the router may not use."""
        sequence_id = request.sequence_id
        if not 0 <= sequence_id <= _MAX_ID:
            raise ValueError(f"sequence_id = {sequence_id}: 0 to {_MAX_ID} is accepted")
        if sequence_id in stream.live or sequence_id in stream.unsent:
            raise ValueError(f"sequence_id = {sequence_id}: still in use by an unfinished sequence")
        stream.last_submitted = sequence_id
        stream.refresh()  # if the stream breaks next, the router must know what had arrived
        if request.key and self._attach(stream, request):
            return
        is_admitted = request.was_admitted or request.generated_token_ids
        if not is_admitted and (request.key or not request.has_begun):
            times = 2 if request.has_begun else 1  # one that has begun elsewhere may exceed the bounds of the queue
            refusal = self._queue_limit.refusal(request.tenant, len(request.prompt_token_ids), _now(), times)
            if refusal is not None and not self._make_room(request):
                stream.send(SequenceUpdate(sequence_id, error=refusal))
                return
        self._last_engine_id += 1
        engine_id = self._last_engine_id
        if request.key:
            for unreachable in self._journal.begin(engine_id, request, stream.number):
                self._cancel_in_engine(unreachable)
            self._announce_orphans()
        self._listen(engine_id, stream, request)
        log_arrival(request)
        self._timers.start(engine_id, request)
        self.requested_adapters.begin(engine_id, request)
        numbered = msgspec.structs.replace(request, sequence_id=engine_id)
        if self._running_limit.enter(numbered):
            self._engine.receive(Submit(numbered))

    def cancel(self, stream: RouterStream, sequence_id: int) -> None:
        """Ends the sequence. Its last update has its usage. Unknown ids are ignored."""
        was_unsent, unsent_usage = sequence_id in stream.unsent, stream.unsent.drop(sequence_id)
        engine_id = stream.live.pop(sequence_id, None)
        if engine_id is None:
            if was_unsent:  # it has ended
                stream.send(SequenceUpdate(sequence_id, error=CANCELLED, usage=unsent_usage))
            return
        listener = self._listeners.pop(engine_id)
        self._journal.forget(engine_id)
        if self._running_limit.is_held(engine_id):
            stream.send(SequenceUpdate(sequence_id, error=CANCELLED))
        else:
            self._cancelled[engine_id] = listener
        self._cancel_in_engine(engine_id)

    def withdraw(self, stream: RouterStream, sequence_id: int) -> None:
        """Gives the sequence back to its router, unless it runs or has ended. Unknown ids are ignored."""
        engine_id = stream.live.get(sequence_id)
        if engine_id is not None:
            self._give_up(engine_id, _WITHDRAWN)

    def deliver(self, updates: Sequence[SequenceUpdate]) -> None:
        """Forwards one step's updates to the streams of their routers."""
        now = _now()
        for update in updates:
            self._timers.follow(update)
            self._forward(update, now)
            if update.finish_reason is not None or update.error is not None:
                # Else it was cancelled, or was counted when it timed out.
                if self._running_limit.is_placed(update.sequence_id):
                    self._count_end(update)
                self._leave_place(update.sequence_id)
        self._announce_orphans()

    def close(self, stream: RouterStream) -> None:
        """The stream has ended: its sequences with keys go on as orphans, the others are cancelled.

        No-op when it was closed before.
        """
        orphaned = self._journal.abandon(stream.number, _now(), stream.router)
        for engine_id in stream.live.values():
            del self._listeners[engine_id]
            if engine_id not in orphaned:
                self._cancel_in_engine(engine_id)
        stream.live.clear()
        self._announce_orphans()

    def disown(self, stream: RouterStream, names: Sequence[tuple[str, str]] | None) -> None:
        """Forgets orphans with these names, None: those that earlier streams of the same connection have left."""
        journal = self._journal
        for engine_id in journal.disown(stream.router) if names is None else journal.disown_named(names):
            self._cancel_in_engine(engine_id)
        self._announce_orphans()

    def expire(self) -> None:
        """Forgets orphans that no router has requested in time."""
        for engine_id in self._journal.expire(_now()):
            self._cancel_in_engine(engine_id)
        self._announce_orphans()

    def give_back(self, stream: RouterStream) -> None:
        """Ends sequences of a stream whose router does not keep up, of the tenants with the most unread updates.

        The router requests them again once it has read these.
        """
        num_values: Counter[str] = Counter()
        for sequence_id, count in stream.unsent.num_values.items():
            if (engine_id := stream.live.get(sequence_id)) is None:
                stream.unsent.end(sequence_id)  # it has ended
            else:
                num_values[self._listeners[engine_id].tenant] += count
        if not stream.unsent.is_overfull:
            return
        tenants = tenants_to_give_back(num_values, stream.unsent.num_left_values)
        for sequence_id, engine_id in [*stream.live.items()]:
            if self._listeners[engine_id].tenant in tenants:
                del self._listeners[engine_id], stream.live[sequence_id]
                self._journal.forget(engine_id)
                self._cancel_in_engine(engine_id)
                stream.send(SequenceUpdate(sequence_id, error=_GIVEN_BACK))
                stream.unsent.end(sequence_id)

    def hand_over(self) -> int:
        """Gives all sequences back to their routers, to go on elsewhere. Returns how many; orphans are lost."""
        num_sequences = len(self)
        for engine_id, (stream, sequence_id, request_id, tenant) in self._listeners.items():
            self._cancel_in_engine(engine_id)
            log_end(request_id, tenant, SequenceUpdate(sequence_id, error=_HANDED_OVER))
            del stream.live[sequence_id]
            stream.send(SequenceUpdate(sequence_id, error=_HANDED_OVER))
        self._listeners.clear()
        for engine_id in self._journal.clear():
            self._cancel_in_engine(engine_id)
        return num_sequences

    def _attach(self, stream: RouterStream, request: SequenceRequest) -> bool:
        """Goes on with the request's sequence if it is here already. The stream that had it so far gets "taken_over".

        A sequence that a stream is reading is given only to a client that resumes it. Another request for it, a
        router's first one or one with which it goes on after a broken connection, arrived late: it is rejected.
        """
        if not request.is_resumed and self._journal.is_read(request):
            stream.send(SequenceUpdate(request.sequence_id, error=_TAKEN_OVER))
            return True
        attachment = self._journal.attach(request, stream.number, _now())
        if attachment is None:
            return False
        self._announce_orphans()
        before = self._listeners.pop(attachment.engine_id, None)
        if before is not None:
            del before.stream.live[before.sequence_id]
            before.stream.send(SequenceUpdate(before.sequence_id, error=_TAKEN_OVER))
        if not attachment.is_finished:
            self._listen(attachment.engine_id, stream, request)
            log_arrival(request)
        if attachment.unread:
            stream.send_past(request.sequence_id, attachment.unread)
        return True

    def _listen(self, engine_id: int, stream: RouterStream, request: SequenceRequest) -> None:
        stream.live[request.sequence_id] = engine_id
        self._listeners[engine_id] = _Listener(stream, request.sequence_id, request.request_id, request.tenant)

    def _forward(self, update: SequenceUpdate, now: float) -> None:
        """Forwards an update under the engine's id to the stream that gets the sequence's updates."""
        if update.error is not None and update.error.kind == "withdrawn":
            self._journal.forget(update.sequence_id)  # if submitted again, it must be computed
        else:
            self._journal.record(update, now)
        listener = self._listeners.get(update.sequence_id)
        if listener is None:
            if update.finish_reason is not None or update.error is not None:
                cancelled = self._cancelled.pop(update.sequence_id, None)
                if cancelled is not None:
                    cancelled.stream.send(SequenceUpdate(cancelled.sequence_id, error=CANCELLED, usage=update.usage))
            return
        stream, sequence_id, request_id, tenant = listener
        if update.finish_reason is not None or update.error is not None:
            del self._listeners[update.sequence_id], stream.live[sequence_id]
            log_end(request_id, tenant, update)
        stream.unsent.add(
            SequenceUpdate(
                sequence_id,
                update.token_ids,
                update.logprobs,
                update.finish_reason,
                update.error,
                update.num_cached_tokens,
                update.computing_s,
                update.usage,
                update.prompt_scores,
                update.embedding,
                update.beam_rounds,
            )
        )
        stream.wake.set()

    def _make_room(self, request: SequenceRequest) -> bool:
        """Gives up waiting sequences of tenants that have more of the full queue. False: there is no room."""
        given_up = self._queue_limit.make_room(request.tenant, len(request.prompt_token_ids), request.weight)
        for engine_id in given_up:
            self._give_up(engine_id, _DROPPED)
        return bool(given_up)

    def _give_up_waiting(self, engine_id: int) -> None:
        """A sequence has waited as long as it may: the engine gives it up, unless it is computing its prompt."""
        message = "it waited longer than was expected on its arrival, and longer than its limit; try again later"
        error = SequenceError("overloaded", message, self._queue_limit.waited_s(engine_id, _now()), "waited")
        self._give_up(engine_id, error)

    def _give_up(self, engine_id: int, error: SequenceError) -> None:
        """Ends a sequence with this error if it waits, in the engine or for a place of its tenant."""
        if not self._running_limit.is_held(engine_id):
            self._engine.receive(GiveUpWaiting(engine_id, error))
            return
        self._timers.end(engine_id)
        self._leave_place(engine_id)
        ending = SequenceUpdate(engine_id, error=error)
        self._count_end(ending)
        self._forward(ending, _now())
        self._announce_orphans()

    def _leave_place(self, engine_id: int) -> None:
        """The sequence has ended: another one of its tenant may take its place."""
        self.requested_adapters.end(engine_id)
        for following in self._running_limit.leave(engine_id):
            self._engine.receive(Submit(following))

    def _time_out(self, engine_id: int) -> None:
        """A sequence's timeout has passed, whether it waits or runs, and whether or not it is an orphan."""
        if self._running_limit.is_held(engine_id):
            self._give_up(engine_id, _TIMEOUT)
        else:
            self._engine.receive(End(engine_id, _TIMEOUT))

    def _count_end(self, ending: SequenceUpdate) -> None:
        self.num_ended[ending.finish_reason or (ending.error.kind if ending.error is not None else "")] += 1

    def _cancel_in_engine(self, engine_id: int) -> None:
        self._timers.end(engine_id)
        if not self._running_limit.is_held(engine_id):
            self._engine.receive(Cancel(engine_id))
        self._leave_place(engine_id)

    def _announce_orphans(self) -> None:
        changed = self._journal.take_changed()
        if changed:
            self._on_orphans(changed)


def _now() -> float:
    return asyncio.get_running_loop().time()
