"""The leader's side of the data plane: one gRPC stream per router, one frame per engine step.

A token costs microseconds here because nothing is done per token but a list append: the engine's thread hands a whole
step over with one `call_soon_threadsafe`, the event loop sorts it by router, and a router that is slower than the
engine gets the steps that piled up merged into one frame. Each stream has one reader and one writer, since concurrent
writes to a gRPC stream may hang.

A router's sequences live as long as its stream: when it ends, for whatever reason, all of them are cancelled, and the
router continues them on another gang. Those with a key go on as orphans for a while, for the router that comes back or
for another one that is asked to go on (`sequence_journal.py`). A leader that leaves hands sequences over itself and
ends the streams. A router must present the cluster's secret token, so that a stranger on the network cannot spend the
gang's time.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import grpc
import msgspec

from ..wire.messages import (
    MAX_MESSAGE_BYTES,
    STREAM_METHOD,
    STREAM_SERVICE,
    TOKEN_KEY,
    Cancel,
    EngineLoad,
    Frame,
    GangInfo,
    Hello,
    OrphanChange,
    ResidencyChange,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    ToLeader,
)
from .leader_config import LeaderConfig
from .queue_limit import QueueLimit
from .router_stream import RouterStream
from .sequence_journal import SequenceJournal
from .sequence_timers import SequenceTimers

# Pings notice a peer whose host vanished; both sides send them, so neither may punish the other for it.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a minute by default
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)

_MAX_ID = (1 << 63) - 1
_BEAT_S = 0.25
_FAREWELL_S = 2.0  # how long routers may take to read what they are told at the end
_HANDED_OVER = SequenceError("handed_over", "the gang leaves")
_TIMEOUT = SequenceError("timeout", "its timeout passed before it was complete")
_TAKEN_OVER = SequenceError("taken_over", "the stream was taken up on another connection")

_log = logging.getLogger(__name__)


class Engine(Protocol):
    """What a frame server needs of an engine; `EngineLoop` is one."""

    def start(self, on_step: Callable[[Sequence[SequenceUpdate], EngineLoad, ResidencyChange], None]) -> None: ...
    def submit(self, request: SequenceRequest) -> None: ...
    def cancel(self, sequence_id: int) -> None: ...
    def give_up_waiting(self, sequence_id: int, error: SequenceError) -> None: ...
    def stop(self) -> None: ...
    @property
    def alive(self) -> bool: ...


class FrameServer:
    """Lets routers use one engine. Starts the engine, and stops it when it is itself stopped.

    All methods belong to the event loop that called `start`.
    """

    def __init__(
        self,
        engine: Engine,
        info: GangInfo,
        token: str,
        config: LeaderConfig,
    ) -> None:
        """What comes when as much waits as the config allows is refused at once, unless it had begun elsewhere."""
        self._engine = engine
        self._info = info
        self._token = token.encode()
        self._server: grpc.aio.Server | None = None
        self._streams: dict[int, RouterStream] = {}
        self._num_streams_ever = 0
        self._listeners: dict[int, tuple[RouterStream, int]] = {}  # by the engine's id: who hears of it, and as what
        self._last_engine_id = 0
        self._journal = SequenceJournal(config)
        self._room = QueueLimit(config)
        self._timers = SequenceTimers(self._room, self._waited, self._timed_out)
        self._leaving = False
        self._resident: set[str] = set()  # adapters by digest, coming ones too
        self._resident_pages: set[int] = set()  # full pages of KV by short key
        self._load = EngineLoad(num_pages=info.num_pages, num_free_pages=info.num_pages)
        self._beat: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToLeader)

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences of all routers; orphans are nobody's."""
        return sum(len(stream.live) for stream in self._streams.values())

    @property
    def load(self) -> EngineLoad:
        """The engine's, as of its last step."""
        return self._load

    @property
    def healthy(self) -> bool:
        return self._server is not None and self._engine.alive

    async def start(self, host: str, port: int = 0) -> str:
        """Starts engine and server; the address on which routers reach it. Port 0 takes a free one."""
        loop = asyncio.get_running_loop()

        def on_step(updates: Sequence[SequenceUpdate], load: EngineLoad, residency: ResidencyChange) -> None:
            # After stop() the loop may be closed while the engine's last step ends.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, updates, load, residency)

        server = grpc.aio.server(options=(*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)))
        handler: Any = grpc.stream_stream_rpc_method_handler(self._serve)  # bytes in, bytes out
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(STREAM_SERVICE, {STREAM_METHOD: handler}),)
        )
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        self._engine.start(on_step)
        self._server = server
        self._beat = asyncio.create_task(self._beat_forever())
        return f"{host}:{bound}"

    async def drain(self, grace_s: float) -> int:
        """Lets sequences end for up to `grace_s`, then hands the others over to their routers; the number of these.

        Afterwards no router is connected, and none can connect any more. Orphans are lost.
        """
        await _until(lambda: self.num_sequences == 0, grace_s)
        self._leaving = True
        num_sequences = self.num_sequences
        for stream in self._streams.values():
            for sequence_id, engine_id in stream.live.items():
                self._cancel_in_engine(engine_id)
                stream.pending.append(SequenceUpdate(sequence_id, error=_HANDED_OVER))
            stream.live.clear()
            stream.is_ending = True
            stream.wake.set()
        self._listeners.clear()
        for engine_id in self._journal.clear():
            self._cancel_in_engine(engine_id)
        await _until(lambda: not self._streams, _FAREWELL_S)
        return num_sequences

    async def stop(self) -> None:
        """Ends all streams, then the engine."""
        if self._beat is not None:
            self._beat.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace=0)
        await asyncio.to_thread(self._engine.stop)

    def _deliver(self, updates: Sequence[SequenceUpdate], load: EngineLoad, residency: ResidencyChange) -> None:
        """Sorts one step's updates by router."""
        now = asyncio.get_running_loop().time()
        for update in updates:
            self._timers.follow(update)
        self._load = msgspec.structs.replace(load, oldest_waiting_s=self._room.oldest_s(now))
        self._resident.difference_update(residency.went)
        self._resident.update(residency.came)
        self._resident_pages.difference_update(residency.pages_went)
        self._resident_pages.update(residency.pages_came)
        for stream in self._streams.values():
            stream.load_is_stale = True
            stream.moved_pages.update(residency.pages_came, residency.pages_went)
            if residency.came or residency.went:
                stream.moved.update(residency.came, residency.went)
                stream.wake.set()
        for update in updates:
            self._tell(update, now)
        self._tell_orphans()

    def _tell(self, update: SequenceUpdate, now: float) -> None:
        """Hands an update of the engine's ids on to whoever hears of the sequence."""
        self._journal.record(update, now)
        listener = self._listeners.get(update.sequence_id)
        if listener is None:
            return  # cancelled, or an orphan
        stream, sequence_id = listener
        if update.finish_reason is not None or update.error is not None:
            del self._listeners[update.sequence_id], stream.live[sequence_id]
        stream.tell(msgspec.structs.replace(update, sequence_id=sequence_id))

    def _waited(self, engine_id: int) -> None:
        """A sequence has waited as long as it may: the engine gives it up, unless it is computing its prompt."""
        waited_s = self._room.oldest_s(asyncio.get_running_loop().time())
        message = "it waited longer than was expected when it came, and longer than it may; try again later"
        self._engine.give_up_waiting(engine_id, SequenceError("overloaded", message, waited_s, "waited"))

    def _timed_out(self, engine_id: int) -> None:
        """A sequence's time is over, whether it waits or runs, and whoever reads it."""
        self._cancel_in_engine(engine_id)
        self._tell(SequenceUpdate(engine_id, error=_TIMEOUT), asyncio.get_running_loop().time())

    def _cancel_in_engine(self, engine_id: int) -> None:
        self._timers.end(engine_id)
        self._engine.cancel(engine_id)

    def _tell_orphans(self) -> None:
        """Lets all routers know soon which orphans have come and gone."""
        changed = self._journal.take_changed()
        if changed:
            for stream in self._streams.values():
                stream.moved_orphans |= changed
                stream.refresh()

    async def _beat_forever(self) -> None:
        """Tells quiet routers the load, which they choose a gang by, and all of them when the engine has died.

        Forgets what nobody has asked for in time.
        """
        while True:
            await asyncio.sleep(_BEAT_S)
            for engine_id in self._journal.expire(asyncio.get_running_loop().time()):
                self._cancel_in_engine(engine_id)
            self._tell_orphans()
            alive = self._engine.alive
            for stream in self._streams.values():
                if not alive:
                    stream.fail("the gang's engine has stopped")
                elif stream.load_is_stale:
                    stream.wake.set()

    async def _serve(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        sent = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
        if not hmac.compare_digest(sent.encode() if isinstance(sent, str) else sent, self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"metadata {TOKEN_KEY}: not this cluster's token")
        if self._leaving or not self._engine.alive:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this gang serves nobody any more")
        self._num_streams_ever += 1
        stream = RouterStream(self._num_streams_ever)
        self._streams[stream.number] = stream
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            hello = Hello(self._info, sorted(self._resident), [*self._resident_pages], self._journal.orphans)
            await context.write(self._encoder.encode(hello))
            stream.refresh()  # a new router learns the load at once
            await self._write(context, stream)
        finally:
            reader.cancel()
            self._close(stream)
        if stream.failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, stream.failure)

    def _close(self, stream: RouterStream) -> None:
        """The stream has ended: what its router may come back for goes on, the rest is cancelled."""
        del self._streams[stream.number]
        orphaned = self._journal.abandon(stream.number, asyncio.get_running_loop().time())
        for engine_id in stream.live.values():
            del self._listeners[engine_id]
            if engine_id not in orphaned:
                self._cancel_in_engine(engine_id)
        stream.live.clear()
        self._tell_orphans()

    async def _write(self, context: grpc.aio.ServicerContext[bytes, bytes], stream: RouterStream) -> None:
        """Writes frames until the stream fails, or ends and the last one is written."""
        while stream.failure is None and (stream.pending or not stream.is_ending):
            await stream.wake.wait()
            stream.wake.clear()
            if not stream.has_news:
                continue
            await context.write(self._encoder.encode(self._next_frame(stream)))

    def _next_frame(self, stream: RouterStream) -> Frame:
        """All that happened since the router's last frame."""
        updates, stream.pending = stream.pending, []
        moved, stream.moved = stream.moved, set()
        pages, stream.moved_pages = stream.moved_pages, set()
        moved_orphans, stream.moved_orphans = stream.moved_orphans, set()
        stream.load_is_stale = False
        residency = ResidencyChange(
            sorted(moved & self._resident),
            sorted(moved - self._resident),
            [*(pages & self._resident_pages)],
            [*(pages - self._resident_pages)],
        )
        orphans = None
        if moved_orphans:
            came = moved_orphans.intersection(self._journal.orphans)
            orphans = OrphanChange(sorted(came), sorted(moved_orphans - came))
        return Frame(updates, self._load, residency, orphans, stream.last_submitted)

    async def _read(self, requests: AsyncIterator[bytes], stream: RouterStream) -> None:
        """Obeys the router until it ends the stream or says something that cannot be understood."""
        failure = "the router ended the stream"
        try:
            async for data in requests:
                if stream.is_ending:
                    continue  # what crossed it: the router sends it elsewhere
                for message in self._decoder.decode(data).messages:
                    if isinstance(message, Cancel):
                        self._cancel(stream, message.sequence_id)
                    else:
                        self._submit(stream, message.request)
        except (msgspec.DecodeError, ValueError) as error:
            failure = f"a router's message is not understood: {error}"
            _log.error("%s", failure)
        finally:
            stream.fail(failure)

    def _submit(self, stream: RouterStream, request: SequenceRequest) -> None:
        sequence_id = request.sequence_id
        if not 0 <= sequence_id <= _MAX_ID:
            raise ValueError(f"sequence_id = {sequence_id}: 0 to {_MAX_ID} is accepted")
        if sequence_id in stream.live:
            raise ValueError(f"sequence_id = {sequence_id}: still in use by an unfinished sequence")
        stream.last_submitted = sequence_id
        stream.refresh()  # a router that hears no more of this gang must know what had reached it
        if request.key and self._attach(stream, request):
            return
        if not (request.has_begun or request.generated_token_ids):
            refusal = self._room.refusal(len(request.prompt_token_ids), asyncio.get_running_loop().time())
            if refusal is not None:
                stream.tell(SequenceUpdate(sequence_id, error=refusal))
                return
        self._last_engine_id += 1
        engine_id = self._last_engine_id
        if request.key:
            for unreachable in self._journal.begin(engine_id, request, stream.number):
                self._cancel_in_engine(unreachable)
            self._tell_orphans()
        stream.live[sequence_id] = engine_id
        self._listeners[engine_id] = stream, sequence_id
        self._timers.start(engine_id, request)
        self._engine.submit(msgspec.structs.replace(request, sequence_id=engine_id))

    def _attach(self, stream: RouterStream, request: SequenceRequest) -> bool:
        """Goes on with the request's sequence if it is here already. Who had it is told."""
        found = self._journal.attach(request, stream.number, asyncio.get_running_loop().time())
        if found is None:
            return False
        self._tell_orphans()
        had = self._listeners.pop(found.engine_id, None)
        if had is not None:
            old_stream, old_id = had
            del old_stream.live[old_id]
            old_stream.tell(SequenceUpdate(old_id, error=_TAKEN_OVER))
        if not found.is_finished:
            stream.live[request.sequence_id] = found.engine_id
            self._listeners[found.engine_id] = stream, request.sequence_id
        if found.update.token_ids or found.is_finished:
            stream.tell(found.update)
        return True

    def _cancel(self, stream: RouterStream, sequence_id: int) -> None:
        engine_id = stream.live.pop(sequence_id, None)
        if engine_id is not None:
            del self._listeners[engine_id]
            self._journal.forget(engine_id)
            self._cancel_in_engine(engine_id)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits for the condition to hold, at most so long."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.sleep(0.02)
