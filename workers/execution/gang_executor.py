"""Executes plans on workers in processes of their own: one message out to each, one back from each."""

from __future__ import annotations

import socket
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import msgspec

from ..decoding.mask_source import MaskSource, NoMasks
from ..plan import (
    INT32_BYTES,
    AdapterFailure,
    HostAdapterStats,
    Int32s,
    MoveEnd,
    SampledToken,
    SequencePlan,
    StatePlan,
    StepPlan,
    StepResult,
    packed,
    unpacked,
)
from ..wire.prompt_scores import PromptScores
from .executor import WorkerLostError

# Whole messages over a socket between a gang's leader and one of its workers.

_LENGTH = struct.Struct("!Q")
_MAX_MESSAGE_BYTES = 1 << 30
# A peer whose host or network is gone is noticed after some 10 s, whether or not it owes an acknowledgement; the kernel
# answers for a process that computes or hangs, so only deadlines notice that.
_VANISHED_PEER = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


class ConnectionLostError(Exception):
    """The other side is gone, or sent something that is no message."""


class Connection:
    """Sends from any thread, receives from one. TCP, because workers may be on other nodes."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _VANISHED_PEER.items():
            if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, message: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive(self) -> bytes:
        """The next message. Waits for it as long as `set_timeout` says."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise ConnectionLostError(f"a message of {length} bytes is announced: none is that long")
        return self._exactly(length)

    def set_timeout(self, timeout_s: float | None) -> None:
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side has closed it already
        self._socket.close()

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                piece = self._socket.recv(min(num_bytes - len(received), 1 << 20))
            except OSError as error:
                raise ConnectionLostError(str(error)) from error
            if not piece:
                raise ConnectionLostError("the other side has closed the connection")
            received += piece
        return bytes(received)


# Messages between a gang's leader and its workers, as msgpack over one connection each.


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A worker's first message. `secret`: the gang's, so that no other process joins."""

    rank: int
    secret: str


class WorkerProgress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker's part of the base is loaded. `num_pages`: of its pool, the same on every worker.

    `num_host_pages`: that its host memory has room for; the gang uses as many as all have.
    """

    kernels: str
    device: str
    num_pages: int
    num_host_pages: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A step is computed. Only the first worker sends the tokens, the scores and what is pooled."""

    step: int
    tokens: dict[int, SampledToken | None]
    host_adapter_stats: HostAdapterStats = HostAdapterStats()
    scores: dict[int, PromptScores | None] = {}
    pooled: dict[int, bytes | None] = {}


class LoadEnded(msgspec.Struct, frozen=True, tag="load_ended"):
    digest: str
    failure: AdapterFailure | None


class MoveEnded(msgspec.Struct, frozen=True, tag="move_ended"):
    end: MoveEnd


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker has failed and ends."""

    problem: str


class WantMasks(msgspec.Struct, frozen=True, tag="want_masks"):
    """The first worker is about to choose tokens, and asks for the masks that are made: `MaskSource.take`.

    Only the masks are sent: for each sequence and step the vocabulary's size in bits.
    """

    positions: list[tuple[int, int]]


class Masks(msgspec.Struct, frozen=True, tag="masks"):
    """The answer, by sequence id."""

    masks: dict[int, bytes]


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """A plan whose sequences have only those of their pages that follow the ones that the worker keeps.

    Made and read by `gang_executor.py`.
    """

    plan: StepPlan
    num_kept_pages: Int32s  # of each of its sequences


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    pass


FromWorker = Join | WorkerProgress | Ready | Done | LoadEnded | MoveEnded | WorkerFailed | WantMasks
ToWorker = Execute | Masks | Stop


# Plans on their way to workers in other processes, which keep the page tables of the sequences that run.
#
# The leader sends the pages that a sequence has got since the last plan with it, and its whole table where the workers
# have none, or where it does not begin with the one that they have; and where its recurrent state is, if that was
# elsewhere in the last plan with it. What workers keep follows from the messages alone, and all get the same ones. What
# is kept of runs that have ended is dropped.


class PlanMismatchError(Exception):
    """A worker does not keep what the leader says: it would compute on wrong pages."""


class DeltaEncoder:
    """The leader's side: knows the tables that every worker keeps."""

    def __init__(self) -> None:
        self.tables: dict[int, Int32s] = {}  # page tables, by sequence id
        self.states: dict[int, StatePlan] = {}  # by sequence id, as of the last plan with it

    def encode(self, plan: StepPlan) -> Execute:
        """The message for the plan. It must be sent, after those for earlier plans."""
        tables, states = self.tables, self.states
        for sequence_id in plan.ended_runs:
            tables.pop(sequence_id, None)
            states.pop(sequence_id, None)
        parts, num_kept = list[SequencePlan](), array("i")
        for part in plan.sequences:
            table, pages = tables.get(part.sequence_id, b""), part.pages
            new = b""
            if pages is not table:  # most sequences do not grow in a step
                if not pages.startswith(table):
                    table = b""
                new = pages[len(table) :]
                tables[part.sequence_id] = pages
            num_kept.append(len(table) // INT32_BYTES)
            state = part.state
            if state is not None and states.get(part.sequence_id) is state:
                state = None
            elif state is not None:
                states[part.sequence_id] = state
            parts.append(_with_pages(part, new, state))
        return Execute(msgspec.structs.replace(plan, sequences=tuple(parts)), packed(num_kept))

    def check_integrity(self, workers: DeltaDecoder) -> None:
        """Raises AssertionError if these workers, which have read all messages, keep other tables."""
        assert self.tables == workers.tables, "leader and workers keep different tables"
        assert self.states == workers.states, "leader and workers keep different states"


class DeltaDecoder:
    """A worker's side: keeps the tables."""

    def __init__(self) -> None:
        self.tables: dict[int, Int32s] = {}  # page tables, by sequence id
        self.states: dict[int, StatePlan] = {}  # by sequence id, as of the last plan with it

    def decode(self, message: Execute) -> StepPlan:
        """The plan, whose sequences have all of their pages.

        Raises PlanMismatchError if another number of a sequence's pages is kept than the leader says.
        """
        tables, states, plan = self.tables, self.states, message.plan
        for sequence_id in plan.ended_runs:
            tables.pop(sequence_id, None)
            states.pop(sequence_id, None)
        parts = list[SequencePlan]()
        for part, num_kept in zip(plan.sequences, unpacked(message.num_kept_pages), strict=True):
            table = tables.get(part.sequence_id, b"") if num_kept else b""
            if len(table) != num_kept * INT32_BYTES:
                raise PlanMismatchError(
                    f"step {plan.step}: the leader says that this worker keeps {num_kept} pages of sequence "
                    f"{part.sequence_id}, and it keeps {len(table) // INT32_BYTES}"
                )
            if part.pages:
                table += part.pages
                tables[part.sequence_id] = table
            if part.state is not None:
                states[part.sequence_id] = part.state
            parts.append(_with_pages(part, table, states.get(part.sequence_id)))
        return msgspec.structs.replace(plan, sequences=tuple(parts))


def _with_pages(part: SequencePlan, pages: Int32s, state: StatePlan | None) -> SequencePlan:
    return SequencePlan(
        part.sequence_id,
        part.token_ids,
        part.start,
        pages,
        part.adapter,
        part.sample,
        part.is_fed,
        part.scores,
        part.pool,
        state,
    )


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
                    reply = Masks(dict(self.masks.take(message.positions, lambda: True)))
                    self._connections[rank].send(msgspec.msgpack.encode(reply))
                elif isinstance(message, WorkerFailed):
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
