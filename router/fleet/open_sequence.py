"""One submitted sequence as its request handler sees it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from ...workers.wire.beams import SearchPath
from ...workers.wire.messages import ErrorKind, SequenceError, SequenceRequest, SequenceUpdate, SequenceUsage
from ...workers.wire.unread_update import UnreadUpdate
from .admission import TimeLimit

REPORT_WAIT_S = 2.0  # for a cancelled sequence's usage: a gang reports it at its next step, unless it is lost
MAX_UNREAD_VALUES = 1 << 14  # tokens and log-probabilities of a sequence that may be unread before it is paused


class SequencePlace(Protocol):
    """Where a sequence is: it waits there, or was submitted there."""

    def cancel(self, sequence: OpenSequence) -> None:
        """Forgets the sequence, which is here, since it was cancelled or has timed out."""


class OpenSequence:
    """An async iterator of updates that ends after one with `finish_reason` or `error`, or once cancelled.

    Updates that arrive while the reader is busy are merged into one: a slow reader gets fewer, larger updates, never a
    growing queue. If far too much is unread (`is_overfull`) no more should be computed until it was read. There is one
    reader at a time; everything belongs to one event loop.

    It keeps all tokens that arrived, so that it can continue at another gang when its own is lost.

    It is in one `SequencePlace` at a time: the dispatcher's `UnsentSequences` or `UnreadSequences`, a
    `LeaderConnection` or, if that broke, its `AwaitingReconnect`. It has none before it is sent, between two places and
    after its end.
    """

    def __init__(self, request: SequenceRequest, *, is_resumed: bool = False, limit: TimeLimit | None = None) -> None:
        """`is_resumed`: a gang may hold it for another connection of its client. `limit`: its time begins now."""
        self.request = request
        self.is_resumed = is_resumed
        self.limit = limit or TimeLimit()
        self.is_new = not self.limit.has_begun  # not yet sent to a gang, nor waiting for one
        self.stays = False  # at the gang that it was sent to, and ends with it
        self.num_moves = 0  # from a gang's queue to another's
        self._wait_s: float | None = None  # how long it may wait at its gang; None: as long as it takes
        self._wait_from: float | None = None  # by the event loop's clock
        self._deadline: float | None = None  # by the event loop's clock
        self._alarm: asyncio.TimerHandle | None = None
        if self.limit.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.time() + self.limit.timeout_s
            self._alarm = loop.call_at(self._deadline, self._time_out)
        self._place: SequencePlace | None = None
        self.num_losses = 0  # gangs that died with it since its last token
        self.num_failed_sends = 0  # gangs that died before it had arrived, since its last token
        self.num_store_failures: Counter[str] = Counter()  # by gang: how often it could not read the adapter
        self._token_ids: list[int] = []  # all that arrived, read or not
        self._num_rounds = 0  # of a beam search, that arrived
        self._search = None if request.beams is None else SearchPath(request.beams, request.beams_so_far)
        self._num_scored = request.num_scored  # tokens of the prompt whose scores arrived
        self._usage = SequenceUsage()  # as last reported
        self.usage_at: float | None = None  # when that was, by time.perf_counter(); None: it was not reported
        self._last_report: asyncio.Future[None] | None = None  # it was cancelled, and its gang reports the usage
        self._arrived: SequenceUpdate | UnreadUpdate | None = None  # not yet read
        self._on_read: Callable[[OpenSequence], None] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """No update will be added any more."""
        return self._closed

    @property
    def is_overfull(self) -> bool:
        """So much is unread that no more should be computed for now."""
        arrived = self._arrived
        if not isinstance(arrived, UnreadUpdate):
            return False
        # Scores of the prompt do not count: their number is bounded, and they are sent only once they are complete.
        return arrived.num_added_values - arrived.num_score_values > MAX_UNREAD_VALUES

    @property
    def has_begun(self) -> bool:
        """A token has arrived, or a round of a beam search."""
        return bool(self._token_ids) or self._num_rounds > 0

    @property
    def usage(self) -> SequenceUsage:
        """Its cost as last reported; tokens that came since then are counted."""
        return self._usage.with_generated(len(self._token_ids))

    @property
    def is_reported(self) -> bool:
        """`usage` will not change any more, if the sequence has ended."""
        return self._last_report is None or self._last_report.done()

    async def reported(self) -> None:
        """Waits until the gang of a cancelled sequence has reported its usage, or cannot report it any more."""
        if self._last_report is not None:
            await asyncio.wait((self._last_report,))

    def await_last_report(self, on_end: Callable[[], None] = lambda: None) -> None:
        """The gang of the sequence, which has ended here, is to report its cost within REPORT_WAIT_S.

        `on_end` is called when it has done so, or cannot do so any more.
        """
        loop = asyncio.get_running_loop()
        self._last_report = report = loop.create_future()
        timer = loop.call_later(REPORT_WAIT_S, self.end_reports)
        report.add_done_callback(lambda _: timer.cancel())
        report.add_done_callback(lambda _: on_end())

    def end_reports(self) -> None:
        """No more usage will be reported."""
        if self._last_report is not None and not self._last_report.done():
            self._last_report.set_result(None)

    def note_usage(self, usage: SequenceUsage | None) -> None:
        """Takes in what its gang has reported, if it did."""
        if usage is not None:
            self._usage, self.usage_at = usage, time.perf_counter()

    @property
    def may_move(self) -> bool:
        """It may move to another gang: no client has had a token of it, nor of the answer that it continues."""
        return not (self.stays or self.has_begun or self.is_resumed or self.limit.has_begun)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, and all tokens that arrived."""
        return len(self.request.prompt_token_ids) + len(self._token_ids)

    def move(self, origin: SequencePlace | None, target: SequencePlace | None) -> None:
        """Moves the sequence, which has not ended, from its place to another one. None: no place."""
        assert not self._closed, "an ended sequence is moved"
        assert self._place is origin, f"the sequence is at {self._place!r}, not at {origin!r}"
        self._place = target

    def request_from_here(self, sequence_id: int) -> SequenceRequest:
        """The request for a leader that is to continue after the tokens so far. `sequence_id`: of its connection."""
        left_s = None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())
        return msgspec.structs.replace(
            self.request,
            sequence_id=sequence_id,
            generated_token_ids=[*self._token_ids],
            num_scored=self._num_scored,
            usage=None if self.usage_at is None else self._usage,
            attempt=self.request.attempt if self.usage_at is None else self._usage.attempt,
            has_begun=self.has_begun or self.limit.has_begun,
            is_resumed=self.is_resumed,
            was_admitted=self.num_moves > 0,
            wait_s=self._wait_s,
            timeout_s=left_s,
            beams_so_far=None if self._search is None else self._search.so_far,
        )

    def admit(self, wait_s: float | None) -> None:
        """Notes that the sequence is sent to its first gang, which gives it up if it still waits after `wait_s`."""
        self.is_new = False
        self._wait_s = wait_s
        self._wait_from = None if wait_s is None else asyncio.get_running_loop().time()

    def leave_queue(self) -> None:
        """Notes that the sequence moves to another gang's queue, where it may wait for the rest of its time."""
        self.num_moves += 1
        if self._wait_s is not None and self._wait_from is not None:
            now = asyncio.get_running_loop().time()
            self._wait_s, self._wait_from = max(0.0, self._wait_s - (now - self._wait_from)), now

    def drop_wait_limit(self) -> None:
        """Lets the sequence wait at gangs for any time, since it has lost a gang or waits for one."""
        self.is_new = False
        self._wait_s = None

    def __aiter__(self) -> OpenSequence:
        return self

    async def __anext__(self) -> SequenceUpdate:
        while self._arrived is None:
            if self._closed:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        arrived, self._arrived = self._arrived, None
        if self._on_read is not None:
            on_read, self._on_read = self._on_read, None
            on_read(self)
        return arrived if isinstance(arrived, SequenceUpdate) else arrived.take_all()

    def when_read(self, on_read: Callable[[OpenSequence], None]) -> None:
        """Calls `on_read` once, when its reader has taken what has arrived."""
        assert self._arrived is not None
        self._on_read = on_read

    def push(self, update: SequenceUpdate) -> None:
        """Adds an update. Ignored when the sequence has ended."""
        if self._closed:
            return
        if update.token_ids or update.beam_rounds:
            self._token_ids += update.token_ids
            for beam_round in update.beam_rounds or ():
                self._num_rounds += 1
                assert self._search is not None
                self._search.add(beam_round)
            self.num_losses = self.num_failed_sends = 0
            self.num_store_failures.clear()
        if update.prompt_scores is not None:
            self._num_scored += update.prompt_scores.num_rows
            self.num_losses = self.num_failed_sends = 0
            self.num_store_failures.clear()
        self.note_usage(update.usage)
        if update.finish_reason is not None or update.error is not None:
            self._close()
        if self._arrived is None:
            self._arrived = update
        else:
            if not isinstance(self._arrived, UnreadUpdate):
                self._arrived = UnreadUpdate(self._arrived)
            self._arrived.add(update)
        self._wake()

    def lose_gang(self, *, is_fault: bool, had_arrived: bool) -> None:
        """Counts the loss of its gang. `is_fault`: the gang died or broke, and was not stopped.

        `had_arrived`: the sequence is known to have reached the gang, and may be what killed it.
        """
        self.drop_wait_limit()
        self.num_losses += is_fault and had_arrived
        self.num_failed_sends += is_fault and not had_arrived

    def lose_store(self, gang_key: str) -> None:
        """Counts that its gang could not read its adapter and has returned it."""
        self.drop_wait_limit()
        self.num_store_failures[gang_key] += 1

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Ends the sequence with an error update, unless it has ended."""
        self.refuse(SequenceError(kind, message))

    def refuse(self, error: SequenceError) -> None:
        """Ends the sequence with this error, unless it has ended."""
        self.push(SequenceUpdate(self.request.sequence_id, error=error))

    def cancel(self) -> None:
        """Forgets the sequence, here and at its leader; unread updates are dropped. No-op when it has ended."""
        if self._closed:
            return
        place = self._place
        self._close()
        self._arrived = None
        if place is not None:
            place.cancel(self)
        self._wake()

    def _time_out(self) -> None:
        """Ends the sequence with an error, after the unread updates. Its place forgets it."""
        place = self._place
        self.fail("timeout", "the request's timeout passed before the answer was complete")
        if place is not None:
            place.cancel(self)

    def _close(self) -> None:
        self._closed = True
        self._place = self._on_read = None
        if self._alarm is not None:
            self._alarm.cancel()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


# Sequences whose connection broke, until it is known whether their leader is still there.

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
        for entry in cut_off:
            entry.sequence.move(None, self)
        self._waiting, self._reason = {entry.sequence: entry for entry in cut_off}, reason
        self._timer = asyncio.get_running_loop().call_later(RECONNECT_WAIT_S, self.give_up)

    def take(self, orphans: Iterable[str]) -> list[OpenSequence]:
        """Removes the sequences with these keys, which the leader, now back, reports as held."""
        keys = set(orphans)
        sequences = [sequence for sequence in self._waiting if sequence.request.key in keys]
        for sequence in sequences:
            del self._waiting[sequence]
            sequence.move(self, None)
        return sequences

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
