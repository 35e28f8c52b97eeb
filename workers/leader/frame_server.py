"""The leader's side of the data plane: one gRPC stream per router, one frame per engine step.

A token costs microseconds here because nothing is done per token but a list append: the engine's thread hands a whole
step over with one `call_soon_threadsafe`, the event loop sorts it by router, and a router that is slower than the
engine gets the steps that piled up merged into one frame, or into several if there is much (`router_stream.py`). One
that reads far too slowly is given its sequences back, so that nothing grows without end. Each stream has one reader and
one writer, since concurrent writes to a gRPC stream may hang.

A router must present the cluster's secret token, so that a stranger on the network cannot spend the gang's time. What
becomes of a router's sequences when its stream ends: `routed_sequences.py`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import grpc
import msgspec

from ..engine_messages import PinChanges
from ..memory.pinned_adapters import PinnedAdapters
from ..wire.engine_load import EngineGauges, EngineLoad, ServedElsewhere, TenantShare
from ..wire.messages import (
    Cancel,
    Disown,
    GangInfo,
    Outdated,
    Pinned,
    Submit,
    SubmitPart,
    ToLeader,
    Withdraw,
)
from ..wire.stream_options import (
    CONNECT_KEY,
    LEADER_OPTIONS,
    MAX_REQUEST_BYTES,
    ROUTER_KEY,
    STREAM_METHOD,
    STREAM_SERVICE,
    TOKEN_KEY,
)
from .residency import KnownShares, RequestedAdapters, Residency
from .routed_sequences import RoutedSequences
from .router_stream import RouterStream, UnsentUpdates
from .served_engine import LeaderConfig, ServedEngine, StepReport

_BEAT_S = 0.25
_FAREWELL_S = 2.0  # how long routers may take to read their last frames

_log = logging.getLogger(__name__)


class FrameServer:
    """Lets routers use one engine. Starts the engine, and stops it when it is itself stopped.

    All methods belong to the event loop that called `start`.
    """

    def __init__(
        self,
        engine: ServedEngine,
        info: GangInfo,
        token: str,
        config: LeaderConfig,
        on_load: Callable[[EngineLoad], None] = lambda load: None,
    ) -> None:
        """Sequences beyond the config's bounds of what waits are refused at once, unless they had begun elsewhere.

        `on_load` gets the load after each step.
        """
        self._engine, self._on_load = engine, on_load
        self._info = info
        self._token = token.encode()
        self._server: grpc.aio.Server | None = None
        self._streams: dict[int, RouterStream] = {}
        self._num_streams_ever = 0
        self._sequences = RoutedSequences(engine, config, self._announce_orphans)
        self._leaving = False
        self._residency, self._shares, self._pinned = Residency(), KnownShares(), PinnedAdapters()
        self._load = EngineLoad(EngineGauges(num_pages=info.num_pages, num_free_pages=info.num_pages))
        self._beat: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToLeader)
        self._submit_decoder = msgspec.msgpack.Decoder(Submit)
        self.largest_frame_bytes = 0  # of all that were sent

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences of all routers, without orphans."""
        return len(self._sequences)

    @property
    def num_routers(self) -> int:
        """Routers that are connected."""
        return len(self._streams)

    @property
    def num_orphans(self) -> int:
        """Sequences that are kept for any router that asks."""
        return len(self._sequences.orphans)

    @property
    def num_ended(self) -> Mapping[str, int]:
        """Sequences that have ended here, by their finish reason or the kind of their error."""
        return self._sequences.num_ended

    @property
    def requested_adapters(self) -> RequestedAdapters:
        """Names and unfinished sequences of adapters."""
        return self._sequences.requested_adapters

    @property
    def resident_adapters(self) -> AbstractSet[str]:
        """Digests of adapters that are in the pool or on their way into it."""
        return self._residency.adapters

    @property
    def hosted_adapters(self) -> AbstractSet[int]:
        """Short digests of adapters that are in host memory."""
        return self._residency.hosted

    @property
    def pinned_adapters(self) -> AbstractSet[str]:
        """Digests of adapters that routers have pinned."""
        return self._pinned.digests

    @property
    def load(self) -> EngineLoad:
        """The engine's, as of its last step."""
        return self._load

    @property
    def adapter_counts(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Loads into the pool and evictions from it, by digest, of the adapters that were loaded most."""
        return self._residency.num_loads, self._residency.num_evictions

    @property
    def shares(self) -> Iterable[TenantShare]:
        """The shares of tenants, as last reported by the engine."""
        return iter(self._shares)

    @property
    def healthy(self) -> bool:
        return self._server is not None and self._engine.alive

    async def start(self, host: str, port: int = 0) -> str:
        """Starts engine and server; the address on which routers reach it. Port 0 takes a free one."""
        loop = asyncio.get_running_loop()

        def on_step(report: StepReport) -> None:
            # After stop() the loop may be closed while the engine's last step ends.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, report)

        server = grpc.aio.server(options=LEADER_OPTIONS)
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

    def change(self, config: LeaderConfig) -> None:
        """Goes by another config from now on; what waits or runs already stays."""
        self._sequences.change(config)

    async def drain(self, grace_s: float) -> int:
        """Lets sequences end for up to `grace_s`, then hands the others over to their routers; the number of these.

        Afterwards no router is connected, and none can connect any more. Orphans are lost.
        """
        await _until(lambda: self.num_sequences == 0, grace_s)
        self._leaving = True
        num_sequences = self._sequences.hand_over()
        for stream in self._streams.values():
            stream.is_ending = True
            stream.wake.set()
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

    def _deliver(self, report: StepReport) -> None:
        """Takes in one step: sorts its updates by router, and notes what else the frames bring."""
        sequences, load = self._sequences, report.load
        sequences.deliver(report.updates)
        gauges = msgspec.structs.replace(
            load.gauges,
            num_waiting=load.gauges.num_waiting + sequences.num_held,
            num_queued_tokens=load.gauges.num_queued_tokens + sequences.num_held_tokens,
            oldest_waiting_s=sequences.oldest_waiting_s,
        )
        self._load = EngineLoad(gauges, load.counters)
        self._on_load(self._load)
        self._residency.apply(report.residency)
        self._shares.apply(report.shares)
        for stream in self._streams.values():
            stream.note_residency(report.residency)
            stream.note_shares(report.shares)
            if stream.unsent.is_overfull:
                self._sequences.give_back(stream)

    def _announce_orphans(self, keys: set[str]) -> None:
        for stream in self._streams.values():
            stream.note_orphans(keys)

    async def _beat_forever(self) -> None:
        """Four times a second: sends the load to routers that get no tokens, since they choose a gang by it; ends all
        streams if the engine has died; and forgets orphans that no router has requested in time.
        """
        while True:
            await asyncio.sleep(_BEAT_S)
            self._sequences.expire()
            self._pin(self._pinned.expire())
            alive = self._engine.alive
            for stream in self._streams.values():
                if not alive:
                    stream.fail("the gang's engine has stopped")
                elif stream.load_is_stale:
                    stream.wake.set()

    async def _serve(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        metadata = dict(context.invocation_metadata() or ())
        token = metadata.get(TOKEN_KEY, "")
        if not hmac.compare_digest(token.encode() if isinstance(token, str) else token, self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"metadata {TOKEN_KEY}: not this cluster's token")
        if self._leaving or not self._engine.alive:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this gang has stopped serving")
        self._num_streams_ever += 1
        stream = RouterStream(
            self._num_streams_ever, str(metadata.get(ROUTER_KEY, "")), int(metadata.get(CONNECT_KEY, 0))
        )
        if not self._replace(stream):
            await context.abort(grpc.StatusCode.ABORTED, "this router has connected again since")
        self._streams[stream.number] = stream
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            hello = stream.greeting(self._info, self._residency, self._sequences.orphans)
            await context.write(self._encoder.encode(hello))
            stream.moved_shares.update(self._shares.tenants)
            stream.refresh()  # a new router learns the load at once
            await self._write(context, stream)
        finally:
            reader.cancel()
            if self._streams.pop(stream.number, None) is not None:  # else a later stream took its place
                self._pinned.leave(stream.router or str(stream.number))
            self._sequences.close(stream)
        if stream.failure is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, stream.failure)

    def _replace(self, stream: RouterStream) -> bool:
        """Ends earlier streams of the same router's connection. False: the stream is itself an earlier one.

        Their end may not have been noticed here, and may not be for a while. Their sequences are orphans from now on:
        the greeting can name all that the router may go on with.
        """
        other_streams = [other for other in self._streams.values() if stream.router and other.router == stream.router]
        if any(other.num_connects > stream.num_connects for other in other_streams):
            return False
        for other in other_streams:
            self._sequences.close(other)
            other.unsent = UnsentUpdates()  # its last write may go on for a while
            other.fail("its router has connected again")
            del self._streams[other.number]
        return True

    async def _write(self, context: grpc.aio.ServicerContext[bytes, bytes], stream: RouterStream) -> None:
        """Writes frames until the stream fails, or ends and the last one is written."""
        while stream.failure is None and (stream.unsent or not stream.is_ending):
            await stream.wake.wait()
            stream.wake.clear()
            if not stream.has_news:
                continue
            frame = stream.take_frame(self._load, self._residency, lambda: self._sequences.orphans, self._shares)
            data = self._encoder.encode(frame)
            self.largest_frame_bytes = max(self.largest_frame_bytes, len(data))
            await context.write(data)

    async def _read(self, requests: AsyncIterator[bytes], stream: RouterStream) -> None:
        """Obeys the router until it ends the stream or says something that cannot be understood."""
        failure = "the router ended the stream"
        try:
            async for data in requests:
                if stream.is_ending or stream.failure is not None:
                    continue  # it crossed the farewell, or another stream's greeting: the router sends it again
                for message in self._decoder.decode(data).messages:
                    match message:
                        case Submit(request):
                            self._sequences.submit(stream, request)
                        case SubmitPart():
                            self._take_part(stream, message)
                        case Cancel(sequence_id):
                            self._sequences.cancel(stream, sequence_id)
                        case Withdraw(sequence_id):
                            self._sequences.withdraw(stream, sequence_id)
                        case Disown(names):
                            self._sequences.disown(stream, names)
                        case Pinned():
                            self._pin(self._pinned.receive(stream.router or str(stream.number), message))
                        case Outdated() | ServedElsewhere():
                            self._engine.receive(message)
        except (msgspec.DecodeError, ValueError) as error:
            failure = f"a router's message is not understood: {error}"
            _log.error("%s", failure)
        finally:
            stream.fail(failure)

    def _pin(self, changes: Mapping[str, bool]) -> None:
        if changes:
            self._engine.receive(PinChanges(changes))

    def _take_part(self, stream: RouterStream, part: SubmitPart) -> None:
        """Submits the request once all of it is here. Raises ValueError if it grows too long."""
        data = stream.parts.setdefault(part.sequence_id, bytearray())
        data += part.data
        if len(data) > MAX_REQUEST_BYTES:
            raise ValueError(f"a request of more than {MAX_REQUEST_BYTES} bytes")
        if part.is_last:
            del stream.parts[part.sequence_id]
            self._sequences.submit(stream, self._submit_decoder.decode(data).request)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits for the condition to hold, up to the timeout."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.sleep(0.02)
