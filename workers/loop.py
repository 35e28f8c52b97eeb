"""The thread that steps an engine, and the thread-safe way to reach it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from .engine import Engine
from .engine_messages import EngineMessage
from .leader.served_engine import OnStep, StepReport
from .wire.engine_load import EngineLoad, TenantShare
from .wire.messages import GangInfo, SequenceError, SequenceUpdate, Submit

# The time after which a step counts as hung: shorter on a gang whose steps were short so far.

LEAST_S = 30.0  # a busy machine, or a prompt after many short steps, must not look like a hang
FACTOR = 20.0  # of the longest step so far


class StepDeadline:
    """Learns from the steps of one engine. Before the first one has ended nothing is known, and the limit holds."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: no step may take longer, whatever those before it took."""
        self._limit_s = self._deadline_s = limit_s
        self._longest_s = 0.0

    @property
    def seconds(self) -> float:
        return self._deadline_s

    def observe(self, step_s: float) -> None:
        """A step has ended, after this time."""
        self._longest_s = max(self._longest_s, step_s)
        self._deadline_s = min(self._limit_s, max(LEAST_S, FACTOR * self._longest_s))


# Times of a gang's steps and loads, from which routers estimate waits.


class EngineTimes:
    """Seconds inside steps, and seconds of adapters' loads, since the engine's start.

    An adapter counts from the beginning of the step that starts its load to the end of the step that commits it, as
    long as its sequences wait. Concurrent loads count each.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._busy_s = self._loading_s = 0.0
        self._began_at = self._ended_at = clock()
        self._load = EngineLoad()  # after the last step

    def begin_step(self) -> None:
        self._began_at = self._clock()

    def end_step(self, load: EngineLoad) -> EngineLoad:
        """The load after the step that ends now, with the times filled in."""
        now = self._clock()
        self._busy_s += now - self._began_at
        # Between two steps the engine may have slept; the loader has not.
        before, self._load = self._load, load
        self._loading_s += before.gauges.num_coming_adapters * (now - self._ended_at)
        num_loads = load.counters.num_adapter_loads - before.counters.num_adapter_loads
        self._loading_s += num_loads * (now - self._began_at)
        self._ended_at = now
        return self.filled_in(load)

    def filled_in(self, load: EngineLoad) -> EngineLoad:
        """The load with the times as of the last step: no counter of an engine ever falls."""
        counters = msgspec.structs.replace(load.counters, busy_s=self._busy_s, loading_s=self._loading_s)
        return EngineLoad(load.gauges, counters)


_log = logging.getLogger(__name__)
_SHARES_S, _MAX_SHARES = 0.25, 512  # how often shares are reported, and of how many tenants at most
_HEARTBEAT_S = 5.0  # between steps while there is nothing to compute


class EngineLoop:
    """Steps the engine while there is work, and sleeps while there is none."""

    def __init__(self, engine: Engine, step_deadline_s: float) -> None:
        """`step_deadline_s`: after which a step counts as hung, often earlier."""
        self._engine = engine
        self._deadline = StepDeadline(step_deadline_s)
        self._wake = threading.Condition()
        self._inbox: deque[EngineMessage] = deque()
        self._copies_ended = 0
        self._stopping = False
        self._failure: SequenceError | None = None
        self._progress_at = time.monotonic()
        self._submitted: set[int] = set()  # unfinished sequences; the loop's thread owns it
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._times = EngineTimes()
        self._shares_due_at = 0.0
        self._on_step: OnStep = lambda report: None
        engine.wake_on_copy_end(self._copy_ended)

    @property
    def info(self) -> GangInfo:
        return self._engine.info

    @property
    def alive(self) -> bool:
        """Whether the thread runs, has not failed, and its current step is not overdue."""
        return (
            self._thread.is_alive()
            and self._failure is None
            and time.monotonic() - self._progress_at < self._deadline.seconds
        )

    def start(self, on_step: OnStep) -> None:
        """Starts the thread. `on_step` is called from it after each step."""
        self._on_step = on_step
        self._thread.start()

    def receive(self, message: EngineMessage) -> None:
        """Hands a message to the engine before its next step, from any thread."""
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def stop(self) -> None:
        """Ends the thread after its current step; unfinished sequences get no more updates."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._engine.close()

    def _copy_ended(self) -> None:
        with self._wake:
            self._copies_ended += 1
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_inbox():
                self._step()
        except Exception as error:
            _log.exception("the engine failed")
            self._failure = SequenceError("gang_lost", f"the engine failed: {type(error).__name__}: {error}")
            self._refuse_all(self._failure)

    def _step(self) -> None:
        updates = self._engine.step()
        self._submitted.difference_update(u.sequence_id for u in updates if u.finish_reason or u.error)
        self._deadline.observe(time.monotonic() - self._progress_at)
        shares: list[TenantShare] = []
        if time.monotonic() >= self._shares_due_at:
            self._shares_due_at = time.monotonic() + _SHARES_S
            shares = self._engine.take_shares(_MAX_SHARES)
        load = self._times.end_step(self._engine.load())
        self._on_step(StepReport(updates, load, self._engine.take_residency_changes(), shares))

    def _refuse_all(self, failure: SequenceError) -> None:
        """Ends all sequences, later ones included, with this error until the loop is stopped."""
        while not self._stopping:
            failed = [SequenceUpdate(sequence_id, error=failure) for sequence_id in sorted(self._submitted)]
            self._submitted.clear()
            if failed:
                self._on_step(StepReport(failed, self._times.filled_in(self._engine.load())))
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._inbox)
                self._submitted.update(m.request.sequence_id for m in self._inbox if isinstance(m, Submit))
                self._inbox.clear()

    def _take_inbox(self) -> bool:
        """Waits until a step is due and the next plan cannot wait longer; passes messages on. False: stop."""
        with self._wake:
            # A step without work is a heartbeat, which finds a worker that died or hangs while the gang is idle.
            self._wake.wait_for(self._is_due, timeout=_HEARTBEAT_S)
            self._progress_at = time.monotonic()
            self._times.begin_step()
            if (spare_s := self._engine.spare_s()) > 0:
                self._wake.wait_for(lambda: self._stopping, spare_s)
            self._copies_ended = 0
            messages = tuple(self._inbox)
            self._inbox.clear()
            stopping = self._stopping
        for message in messages:
            if isinstance(message, Submit):
                self._submitted.add(message.request.sequence_id)
            self._engine.receive(message)
        return not stopping

    def _is_due(self) -> bool:
        if self._stopping or self._inbox or self._copies_ended:
            return True
        return self._engine.has_work() and not self._engine.waits
