"""Executes plans on workers in processes of their own: one message out to each, one back from each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import msgspec

from ..decoding.mask_source import MaskSource, NoMasks
from ..plan import AdapterFailure, MoveEnd, SampledToken, StepPlan, StepResult
from .connection import Connection, ConnectionLostError
from .executor import WorkerLostError
from .gang_messages import Done, Failed, FromWorker, LoadEnded, Masks, MoveEnded, Stop, WantMasks
from .plan_deltas import DeltaEncoder


class GangExecutor:
    """All workers execute the same plan. A copy has ended when it has ended on all of them."""

    feeds_tokens = False

    def __init__(self, connections: Sequence[Connection], rendezvous: object, step_deadline_s: float) -> None:
        """`connections`: of workers that are ready, by rank. `step_deadline_s`: a worker that takes longer hangs.

        `rendezvous`: the workers' store, kept here because it must live as long as they do.
        """
        self._connections, self._rendezvous, self._step_deadline_s = connections, rendezvous, step_deadline_s
        self._done: list[SimpleQueue[Done | WorkerLostError]] = [SimpleQueue() for _ in connections]
        # By digest: the failure, or None, of each worker that has reported.
        self._loads: dict[str, list[AdapterFailure | None]] = {}
        self._ended: SimpleQueue[str | AdapterFailure] = SimpleQueue()
        self._moves: dict[int, list[MoveEnd]] = {}  # by number: the end on each worker that has reported
        self._moved: SimpleQueue[MoveEnd] = SimpleQueue()
        self._lock = threading.Lock()
        self._failure: WorkerLostError | None = None
        self._closing = False
        self._step = 0  # of the plan that was begun last
        self._wake: Callable[[], None] = lambda: None
        self._encoder = msgspec.msgpack.Encoder()
        self._deltas = DeltaEncoder()
        self.masks: MaskSource = NoMasks()  # made here, for the first worker
        for rank in range(len(connections)):
            threading.Thread(target=self._listen, args=(rank,), name=f"worker-{rank}", daemon=True).start()

    def begin(self, plan: StepPlan) -> None:
        if self._failure is not None:
            raise self._failure
        message = self._encoder.encode(self._deltas.encode(plan))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send(message)
            except ConnectionLostError as error:
                raise WorkerLostError(f"worker {rank} is lost: {error}") from error
        self._step = plan.step
        self.masks.follow(plan, {})

    def finish(self) -> StepResult:
        tokens: dict[int, SampledToken | None] = {}
        done = [self._result(rank, self._step) for rank in range(len(self._connections))]
        for each in done:
            tokens |= each.tokens
        loaded, failed = self._take_ended()
        num_hung_reads = max(each.host_adapter_stats.num_hung_reads for each in done)
        stats = msgspec.structs.replace(done[0].host_adapter_stats, num_hung_reads=num_hung_reads)
        return StepResult(self._step, tokens, loaded, failed, self._take_moved(), stats, done[0].scores, done[0].pooled)

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self) -> None:
        """Sends Stop to the workers; one that does not read it ends with its connection."""
        self._closing = True
        for connection in self._connections:
            try:
                connection.send(self._encoder.encode(Stop()))
            except ConnectionLostError:
                pass  # the worker has ended already
            connection.close()

    def _result(self, rank: int, step: int) -> Done:
        try:
            done = self._done[rank].get(timeout=self._step_deadline_s)
        except Empty:
            raise WorkerLostError(
                f"worker {rank} gave no result of step {step} within {self._step_deadline_s:g} s"
            ) from None
        if isinstance(done, WorkerLostError):
            raise done
        assert done.step == step, f"worker {rank} answers step {done.step}, and {step} was expected"
        return done

    def _take_ended(self) -> tuple[tuple[str, ...], tuple[AdapterFailure, ...]]:
        loaded: list[str] = []
        failed: list[AdapterFailure] = []
        while True:
            try:
                ended = self._ended.get_nowait()
            except Empty:
                return tuple(loaded), tuple(failed)
            if isinstance(ended, AdapterFailure):
                failed.append(ended)
            else:
                loaded.append(ended)

    def _listen(self, rank: int) -> None:
        decoder = msgspec.msgpack.Decoder(FromWorker)
        try:
            while True:
                message = decoder.decode(self._connections[rank].receive())
                if isinstance(message, Done):
                    self._done[rank].put(message)
                elif isinstance(message, LoadEnded):
                    self._load_ended(message)
                elif isinstance(message, MoveEnded):
                    self._move_ended(message.end)
                elif isinstance(message, WantMasks):
                    made = Masks(dict(self.masks.take(message.wanted, lambda: True)))
                    self._connections[rank].send(msgspec.msgpack.encode(made))
                elif isinstance(message, Failed):
                    raise ConnectionLostError(message.problem)
        except (ConnectionLostError, msgspec.MsgspecError) as error:
            if not self._closing:
                self._fail(WorkerLostError(f"worker {rank} is lost: {error}"))

    def _load_ended(self, message: LoadEnded) -> None:
        with self._lock:
            reported = self._loads.setdefault(message.digest, [])
            reported.append(message.failure)
            if len(reported) < len(self._connections):
                return
            del self._loads[message.digest]
        failures = [failure for failure in reported if failure is not None]
        # A fault of the adapter itself counts before an unavailable store.
        failures.sort(key=lambda failure: failure.is_unavailable)
        self._ended.put(failures[0] if failures else message.digest)
        self._wake()

    def _move_ended(self, end: MoveEnd) -> None:
        with self._lock:
            reported = self._moves.setdefault(end.number, [])
            reported.append(end)
            if len(reported) < len(self._connections):
                return
            del self._moves[end.number]
        problem = next((each.problem for each in reported if each.problem is not None), None)
        self._moved.put(MoveEnd(end.number, max(each.seconds for each in reported), problem))
        self._wake()

    def _take_moved(self) -> tuple[MoveEnd, ...]:
        moved: list[MoveEnd] = []
        while True:
            try:
                moved.append(self._moved.get_nowait())
            except Empty:
                return tuple(moved)

    def _fail(self, failure: WorkerLostError) -> None:
        """Fails the current step and all later ones."""
        self._failure = self._failure or failure
        for queue in self._done:
            queue.put(failure)
        self._wake()
