"""One router's connection to one gang leader: many sequences over one gRPC stream.

There is one writer and one reader, since concurrent writes to a gRPC stream may hang. Requests and cancels that come
while a write is under way go out together in the next message. The connection is made again, with growing
pauses, until it is closed or retired. When it breaks, or the leader hands its sequences over, all of its sequences are
given back. Those with a key wait for a moment first: if the leader is still there, it has kept them, and they continue
there (`open_sequence.py`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import grpc
import msgspec

from ...workers.wire.engine_load import EngineLoad, TenantShare
from ...workers.wire.messages import (
    CANCELLED,
    Cancel,
    Disown,
    Frame,
    FromLeader,
    GangInfo,
    Hello,
    News,
    SequenceError,
    SequenceUpdate,
    Submit,
    SubmitPart,
    ToLeaderMessage,
    Withdraw,
)
from ...workers.wire.stream_options import (
    CONNECT_KEY,
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    ROUTER_KEY,
    ROUTER_OPTIONS,
    STREAM_METHOD,
    STREAM_SERVICE,
    TOKEN_KEY,
)
from .adapter_uses import asker_of
from .affinity import RoutingConfig, RoutingRequest
from .known_gang import KnownGang
from .open_sequence import AwaitingReconnect, CutOffSequence, OpenSequence

# A router's messages to one leader that wait to be written, encoded together.

FULL_MESSAGE_BYTES = 1 << 20  # a message that has grown to this size takes no more requests
PART_BYTES = 1 << 20  # of a request that is longer, in a message
assert FULL_MESSAGE_BYTES + 2 * PART_BYTES < MAX_MESSAGE_BYTES


class _EncodedToLeader(msgspec.Struct, frozen=True):
    """A `ToLeader` whose messages are encoded already."""

    messages: list[msgspec.Raw]


class Outbox:
    """Messages in the order in which they were put. Belongs to one event loop."""

    def __init__(self, on_too_large: Callable[[Submit, str], None]) -> None:
        """`on_too_large` gets a request that is not sent, and why."""
        self._on_too_large = on_too_large
        self._messages: deque[ToLeaderMessage] = deque()
        self._encoded_parts: deque[bytes] = deque()  # of the message that was the first
        self._is_filled = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()

    def put(self, message: ToLeaderMessage) -> None:
        self._messages.append(message)
        self._is_filled.set()

    def clear(self) -> None:
        self._messages.clear()
        self._encoded_parts.clear()
        self._is_filled.clear()

    async def take(self) -> bytes:
        """The messages as an encoded `ToLeader`, or as many of them as fit, as soon as there are any."""
        while True:
            await self._is_filled.wait()
            data = self._encoded()
            if data is not None:
                return data

    def _encoded(self) -> bytes | None:
        """None: no message was left that may be sent."""
        entries: list[msgspec.Raw] = []
        num_bytes = 0
        while num_bytes < FULL_MESSAGE_BYTES and (self._encoded_parts or self._messages):
            if not self._encoded_parts:
                self._encode(self._messages.popleft())
                continue
            entry = self._encoded_parts.popleft()
            entries.append(msgspec.Raw(entry))
            num_bytes += len(entry)
        if not self._messages and not self._encoded_parts:
            self._is_filled.clear()
        return self._encoder.encode(_EncodedToLeader(entries)) if entries else None

    def _encode(self, message: ToLeaderMessage) -> None:
        """Fills the parts, unless the message may not be sent."""
        entry = self._encoder.encode(message)
        if len(entry) <= PART_BYTES or not isinstance(message, Submit):
            self._encoded_parts.append(entry)
            return
        if len(entry) > MAX_REQUEST_BYTES:
            problem = f"the request takes {len(entry)} bytes on its way to the workers"
            self._on_too_large(message, f"{problem}: at most {MAX_REQUEST_BYTES} are accepted")
            return
        for start in range(0, len(entry), PART_BYTES):
            end = start + PART_BYTES
            part = SubmitPart(message.request.sequence_id, entry[start:end], is_last=end >= len(entry))
            self._encoded_parts.append(self._encoder.encode(part))


FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0  # while a gang cannot be reached, what it had may be computed twice
HELLO_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)

# What was lost: the gang's process or the connection to it, or its engine.
FaultKind = Literal["connection", "engine"]


@dataclass(eq=False, slots=True)
class Unbegun:
    """A sequence that was sent to a gang and has had no token."""

    num_cached_tokens: int  # of its prompt whose KV is kept there
    target: str | None = None  # the key of the gang that it is recalled for


class _HandedOverError(Exception):
    """The leader stops and has given its sequences back, to continue elsewhere."""


class _EngineFailedError(ConnectionError):
    """The leader is reachable, but cannot compute any more."""


class LeaderConnection:
    """A `SequencePlace`, connected from `start` on until it is closed, or retired and idle.

    Belongs to one event loop.
    """

    def __init__(
        self,
        address: str,
        token: str,
        routing: RoutingConfig,
        on_connect: Callable[[], None],
        on_lost: Callable[[list[OpenSequence], str], None],
        on_orphans: Callable[[LeaderConnection, Collection[str]], None] = lambda connection, keys: None,
        on_fault: Callable[[FaultKind], None] = lambda kind: None,
        on_load: Callable[[Sequence[TenantShare]], None] = lambda shares: None,
        on_withdrawn: Callable[[OpenSequence, str], None] = lambda sequence, target: None,
        on_store_failure: Callable[[OpenSequence, SequenceError], None] = lambda sequence, error: sequence.refuse(
            error
        ),
    ) -> None:
        """`on_lost` gets the unfinished sequences of a connection that ended, and the reason.

        `on_orphans` gets this connection and the keys of sequences that the leader keeps for any router that asks: all
        of them at the greeting, later those that it has begun to keep. `on_fault`: a connected gang was lost that had
        not been asked to stop. `on_load`: the gang has reported its load; it gets the tenants' shares that have
        changed. `on_withdrawn` gets a sequence that has left the gang's queue, and the key of the gang that it is meant
        for. `on_store_failure` gets a sequence that the gang has given back because it cannot read its adapter, and its
        error.
        """
        self.address = address
        self.info: GangInfo | None = None  # None: not connected
        self.known_gang = KnownGang(routing)
        self.retired = False
        self._token = token
        self._name = secrets.token_hex(8)  # lets the leader recognise its streams as those of one router
        self._num_connects = 0
        self._routing = routing
        self._on_connect, self._on_lost = on_connect, on_lost
        self._on_orphans, self._on_fault = on_orphans, on_fault
        self._on_load, self._on_withdrawn = on_load, on_withdrawn
        self._on_store_failure = on_store_failure
        self._awaiting_reconnect = AwaitingReconnect(self._report_lost)
        self._last_gang_id = ""
        self._last_arrived = 0  # id of the newest sequence that the leader has confirmed
        self._sequences: dict[int, OpenSequence] = {}  # by the id that they have on this connection
        self._ids: dict[OpenSequence, int] = {}  # the same, the other way round
        self._cancelled: dict[int, OpenSequence] = {}  # until the leader has reported their usage
        self._unbegun: dict[OpenSequence, Unbegun] = {}  # those that may move, in the order of their submission
        self._last_id = 0
        self._outbox = Outbox(self._refuse)
        self._decoder: msgspec.msgpack.Decoder[FromLeader] = msgspec.msgpack.Decoder(FromLeader)
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> EngineLoad:
        """As of the last frame."""
        return self.known_gang.load

    @property
    def block_size(self) -> int:
        """Tokens of a page there. Only while connected."""
        assert self.info is not None
        return self.info.block_size

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def start(self) -> None:
        self._task = asyncio.create_task(self._stay_connected(), name=f"leader {self.address}")

    def retire(self) -> None:
        """Takes no new sequences any more. Closes when the last sequence has ended, or when the connection breaks."""
        self.retired = True
        self._end_if_idle()

    async def close(self) -> None:
        """Ends the connection now; its sequences are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def submit(self, sequence: OpenSequence, request: RoutingRequest, page_keys: Sequence[int] = ()) -> None:
        """Sends a sequence's request under an id of this connection's own. Only while connected and not retired.

        `request`: what it was routed by, with the number of tokens that are to be computed there. `page_keys`: short
        keys of its full pages, as far as they were made.
        """
        assert self.info is not None
        assert not self.retired
        self._start(sequence, request, page_keys)

    @property
    def num_unbegun(self) -> int:
        """Sequences that may still move to another gang."""
        return len(self._unbegun)

    def newest_unbegun(self) -> Iterator[tuple[OpenSequence, Unbegun]]:
        """Sequences that may still move to another gang, the newest first."""
        return reversed(self._unbegun.items())

    def withdraw(self, sequence: OpenSequence, target: str) -> None:
        """Asks for an unbegun sequence to be given back if it still waits; `target`: the key of the gang it is for."""
        self._unbegun[sequence].target = target
        self._outbox.put(Withdraw(self._ids[sequence]))

    def send(self, news: News) -> None:
        """Sends the leader a message that is not about a sequence. No-op while the connection is broken."""
        if self.info is not None:
            self._outbox.put(news)

    def _start(self, sequence: OpenSequence, request: RoutingRequest, page_keys: Sequence[int] = ()) -> None:
        self._last_id += 1
        sequence_id = self._last_id
        sequence.move(None, self)
        self._sequences[sequence_id] = sequence
        self._ids[sequence] = sequence_id
        if sequence.may_move:
            self._unbegun[sequence] = Unbegun(max(0, sequence.num_tokens - request.num_tokens))
        self.known_gang.add_sequence(request, page_keys, sequence.request.key)
        self._outbox.put(Submit(sequence.request_from_here(sequence_id)))

    def cancel(self, sequence: OpenSequence) -> None:
        sequence_id = self._ids[sequence]
        self._outbox.put(Cancel(sequence_id))
        sequence.await_last_report(partial(self._drop_cancelled, sequence_id))
        self._cancelled[sequence_id] = sequence
        self._forget(sequence)

    def take_back(self, tenant: str) -> None:
        """`on_lost` gets the tenant's sequences, but for background ones: the gang computes them no more."""
        for sequence_id, sequence in [*self._sequences.items()]:
            if sequence.request.tenant == tenant and not (sequence.request.is_background or sequence.stays):
                self._outbox.put(Cancel(sequence_id))
                self._cancelled[sequence_id] = sequence  # until the leader has reported its usage
                self._give_back(sequence, "its tenant has paused its requests")

    def disown(self, names: Sequence[tuple[str, str]]) -> None:
        """Has the leader forget those of these sequences (tenant and key) that it keeps for any router that asks."""
        self._outbox.put(Disown([*names]))

    def living(self, keys: Collection[str]) -> list[OpenSequence]:
        """The sequences that are here and have one of these keys."""
        return [sequence for sequence in self._ids if sequence.request.key in keys]

    def _forget(self, sequence: OpenSequence) -> None:
        """The sequence has ended here."""
        del self._sequences[self._ids.pop(sequence)]
        self._unbegun.pop(sequence, None)
        request, adapter = sequence.request, sequence.request.adapter
        self.known_gang.ended(
            None if adapter is None else adapter.digest, request.key, asker_of(request.tenant, request.owner)
        )
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        """A retired connection ends with its last sequence."""
        if self.retired and not (self._sequences or self._cancelled) and self._task is not None:
            self._task.cancel()

    async def _stay_connected(self) -> None:
        try:
            await self._connect_until_retired()
        finally:
            self._awaiting_reconnect.give_up()

    async def _connect_until_retired(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self.retired:
            reason, is_fault = "the connection was closed", True
            fault_kind: FaultKind = "connection"
            try:
                async with grpc.aio.insecure_channel(self.address, options=ROUTER_OPTIONS) as channel:
                    call: Any = channel.stream_stream(f"/{STREAM_SERVICE}/{STREAM_METHOD}")(metadata=self._metadata())
                    await self._greet(call)
                    pause_s = FIRST_PAUSE_S
                    await self._exchange(call)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except _HandedOverError as farewell:
                reason, is_fault = str(farewell), False
            except _EngineFailedError as error:
                reason, fault_kind = str(error), "engine"
            except (TimeoutError, msgspec.DecodeError, ConnectionError) as error:
                reason = str(error)
            except Exception as error:  # a bug must not leave the router without this gang for good
                _log.exception("the connection to %s broke unexpectedly", self.address)
                reason = repr(error)
            finally:
                if is_fault and self.info is not None and (self._sequences or not self.retired):
                    self._on_fault(fault_kind)
                self._disconnected(reason, is_fault=is_fault)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the next stream. The leader takes the newest stream of this connection as its only one."""
        self._num_connects += 1
        return (TOKEN_KEY, self._token), (ROUTER_KEY, self._name), (CONNECT_KEY, str(self._num_connects))

    async def _greet(self, call: Any) -> None:
        """Waits for the leader's greeting. From then on the gang can be chosen.

        The leader has ended earlier streams before it greets, so the greeting names all that it has kept of them. What
        is not taken up again now has gone elsewhere or was given up, and the leader may forget it.
        """
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                data = await call.read()
        except TimeoutError:
            raise TimeoutError(f"no greeting within {HELLO_TIMEOUT_S} s") from None
        if data is grpc.aio.EOF:
            raise ConnectionError("the leader ended the stream before its greeting")
        hello = self._decoder.decode(data)
        if not isinstance(hello, Hello):
            raise ConnectionError("the leader sent a frame before its greeting")
        self.info = hello.info
        self.known_gang = KnownGang.greeted(self._routing, hello)
        _log.info("connected to gang %s at %s", hello.info.gang_id, self.address)
        if hello.info.gang_id == self._last_gang_id:  # else it is another gang at the same address
            self._go_on(hello.orphans)
        self._last_gang_id = hello.info.gang_id
        self._awaiting_reconnect.give_up()
        self._on_connect()
        self._outbox.put(Disown())
        self._on_orphans(self, hello.orphans)

    def _go_on(self, orphans: Iterable[str]) -> None:
        """Submits the sequences again that the leader has kept of a connection that broke."""
        for sequence in self._awaiting_reconnect.take(orphans):
            sequence.is_resumed = False  # a client that comes back meanwhile, here or elsewhere, goes first
            digest = sequence.request.adapter.digest if sequence.request.adapter else None
            self._start(
                sequence, RoutingRequest(digest, 0, 0, tenant=sequence.request.tenant, owner=sequence.request.owner)
            )
            self._unbegun.pop(sequence, None)

    async def _exchange(self, call: Any) -> None:
        """Reads frames and writes messages until the stream breaks or the leader gives sequences back."""
        writer = asyncio.create_task(self._write(call))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                message = self._decoder.decode(data)
                if isinstance(message, Frame):
                    self._receive(message)
        finally:
            writer.cancel()
        raise ConnectionError("the leader ended the stream")

    def _receive(self, frame: Frame) -> None:
        self.known_gang.receive(frame)
        self._last_arrived = frame.last_submitted
        given_back: SequenceError | None = None
        for update in frame.updates:
            sequence = self._sequences.get(update.sequence_id)
            if sequence is None:
                self._note_last_report(update)
                continue
            if update.error is not None and update.error.kind in ("handed_over", "gang_lost", "given_back"):
                if update.token_ids or update.usage is not None or update.prompt_scores is not None:
                    sequence.push(msgspec.structs.replace(update, error=None))
                if update.error.kind == "given_back":
                    self._give_back(sequence, update.error.message)
                else:
                    given_back = update.error
                continue
            if update.error is not None and update.error.kind == "withdrawn":
                sequence.note_usage(update.usage)
                self._withdraw(sequence)
                continue
            if update.error is not None and update.error.kind == "store_unavailable":
                sequence.note_usage(update.usage)
                sequence.move(self, None)
                self._forget(sequence)
                self._on_store_failure(sequence, update.error)
                continue
            if self._unbegun and update.token_ids:
                self._unbegun.pop(sequence, None)
            sequence.push(update)
            if sequence.closed:
                self._forget(sequence)
            elif sequence.is_overfull:
                self._outbox.put(Cancel(update.sequence_id))
                self._give_back(sequence, "its client does not read")
        if given_back is not None:  # sequences that have not reached the leader must go elsewhere too
            is_farewell = given_back.kind == "handed_over"
            raise (_HandedOverError if is_farewell else _EngineFailedError)(given_back.message)
        if frame.orphans is not None and frame.orphans.came:
            self._on_orphans(self, frame.orphans.came)
        self._on_load(frame.shares)

    def _note_last_report(self, update: SequenceUpdate) -> None:
        """Takes in an update of a sequence that was cancelled here."""
        sequence = self._cancelled.get(update.sequence_id)
        if sequence is None:
            return
        sequence.note_usage(update.usage)
        if update.finish_reason is not None or update.error is not None:
            sequence.end_reports()
            self._drop_cancelled(update.sequence_id)

    def _drop_cancelled(self, sequence_id: int) -> None:
        """A cancelled sequence was reported, or will not be."""
        self._cancelled.pop(sequence_id, None)
        self._end_if_idle()

    def _end_reports(self) -> None:
        """The leader reports nothing of cancelled sequences any more."""
        cancelled, self._cancelled = self._cancelled, {}
        for sequence in cancelled.values():
            sequence.end_reports()

    def _withdraw(self, sequence: OpenSequence) -> None:
        """The sequence has left the gang's queue, to go where it was recalled for."""
        unbegun = self._unbegun.get(sequence)
        self._forget(sequence)
        sequence.move(self, None)
        self._on_withdrawn(sequence, "" if unbegun is None or unbegun.target is None else unbegun.target)

    def _give_back(self, sequence: OpenSequence, reason: str) -> None:
        """The sequence is no longer here, and continues when it can."""
        self._forget(sequence)
        sequence.move(self, None)
        self._report_lost([CutOffSequence(sequence, had_arrived=True)], reason, is_fault=False)

    async def _write(self, call: Any) -> None:
        """Writes what the outbox holds. Ends quietly when the stream breaks: the reader learns why."""
        while True:
            data = await self._outbox.take()
            try:
                await call.write(data)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    def _refuse(self, message: Submit, problem: str) -> None:
        """A request is too large to be sent."""
        sequence = self._sequences.get(message.request.sequence_id)
        if sequence is None:
            self._note_last_report(SequenceUpdate(message.request.sequence_id, error=CANCELLED))
            return
        sequence.fail("invalid_request", problem)
        self._forget(sequence)

    def _disconnected(self, reason: str, *, is_fault: bool) -> None:
        """The connection has ended, or could not be made."""
        self._awaiting_reconnect.give_up()  # sequences of an earlier loss wait for one attempt only
        if self.info is not None and not self.retired:
            _log.warning("lost gang %s at %s: %s", self.info.gang_id, self.address, reason)
        self.info = None
        self.known_gang = KnownGang(self._routing)
        self._outbox.clear()
        cut_off = [CutOffSequence(sequence, key <= self._last_arrived) for key, sequence in self._sequences.items()]
        self._sequences, self._ids, self._unbegun = {}, {}, {}
        self._end_reports()
        for entry in cut_off:
            entry.sequence.move(self, None)
        if not is_fault:
            self._report_lost(cut_off, reason, is_fault=False)
            return
        may_return = not self.retired
        self._report_lost([entry for entry in cut_off if not (may_return and entry.sequence.request.key)], reason)
        self._awaiting_reconnect.wait([entry for entry in cut_off if may_return and entry.sequence.request.key], reason)

    def _report_lost(self, cut_off: list[CutOffSequence], reason: str, *, is_fault: bool = True) -> None:
        """Gives sequences back to the dispatcher."""
        for entry in cut_off:
            entry.sequence.lose_gang(is_fault=is_fault, had_arrived=entry.had_arrived)
        self._on_lost([entry.sequence for entry in cut_off], reason)
