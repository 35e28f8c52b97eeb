"""A network between routers and leaders that delays, stalls, cuts and goes silent, by a seed, in simulated time.

It stands in for `grpc.aio`: both sides run their own code over it. A link is all that lies between one router and one
leader. Messages of a stream arrive in order, each once, until the stream breaks; then those under way are lost, and
each side learns of it at a time of its own. Connects overtake each other.

A router reaches a leader that listens at `host:port` as `router@host:port`: so the network knows which router connects.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import grpc

WINDOW_BYTES = 1 << 14  # that may be under way in one direction; then its writer waits
NOTICE_S = 10.0  # after which each side of a stream that has gone silent has noticed it, as with keepalive
_Metadata = tuple[tuple[str, str], ...]


class _BrokenError(Exception):
    """The stream has broken."""


class Link:
    """The way between one router and one leader, with all connections that were ever made over it and still live."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.delay_s = 0.002  # the mean, one way
        self.bytes_per_s = 1e7
        self.connect_s = 0.01  # the longest extra time of a connect
        self.refuses = False
        self.whole = asyncio.Event()  # what is sent arrives; else it waits
        self.whole.set()
        self.connections: dict[Connection, None] = {}  # in an order that does not change from run to run

    def drawn_delay_s(self) -> float:
        return self.rng.expovariate(1 / self.delay_s)

    def cut(self) -> None:
        """Ends the connections that there are."""
        for connection in [*self.connections]:
            connection.cut(self.drawn_delay_s(), self.drawn_delay_s())

    def stall(self) -> None:
        """Nothing arrives until `mend`. A side that receives nothing for too long gives the connection up."""
        self.whole.clear()
        for connection in [*self.connections]:
            connection.notice_stall(NOTICE_S * self.rng.uniform(0.5, 1), NOTICE_S * self.rng.uniform(0.5, 1))

    def silence(self) -> None:
        """The connections that there are carry nothing any more, and each side notices it sooner or later."""
        for connection in [*self.connections]:
            connection.is_silent = True
            connection.cut(self.rng.uniform(0, NOTICE_S), self.rng.uniform(0, NOTICE_S))

    def mend(self) -> None:
        """From now on all is well. Routers notice at once which connections have gone silent; leaders may not."""
        self.delay_s, self.bytes_per_s, self.connect_s, self.refuses = 0.002, 1e7, 0.01, False
        self.whole.set()
        for connection in [*self.connections]:
            if connection.is_silent:
                connection.cut(self.drawn_delay_s(), None)


class _Pipe:
    """One direction of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._under_way: deque[tuple[float, bytes]] = deque()
        self.num_bytes = 0
        self._arrived: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self.is_over_for_reader = self._is_over_for_writer = False
        self._due_s = 0.0
        self._pump = asyncio.create_task(self._carry())

    async def write(self, data: bytes) -> None:
        while self.num_bytes > WINDOW_BYTES and not self._is_over_for_writer:
            await self._wait()
        if self._is_over_for_writer:
            raise _BrokenError
        link = self._connection.link
        now_s = asyncio.get_running_loop().time()
        self._due_s = max(self._due_s, now_s + link.drawn_delay_s()) + len(data) / link.bytes_per_s
        self._under_way.append((self._due_s, data))
        self.num_bytes += len(data)
        self._notify()

    async def read(self) -> bytes:
        while not self._arrived:
            if self.is_over_for_reader:
                raise _BrokenError
            await self._wait()
        return self._arrived.popleft()

    def end_reading(self) -> None:
        """What is under way is lost. What has arrived can be read. The writer does not learn of it by this."""
        self.is_over_for_reader = True
        self._pump.cancel()
        self._notify()

    def end_writing(self) -> None:
        self._is_over_for_writer = True
        self._notify()

    async def _carry(self) -> None:
        while True:
            while not self._under_way:
                await self._wait()
            due_s, data = self._under_way.popleft()
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
            await self._connection.link.whole.wait()
            if self._connection.is_silent:
                continue  # its bytes stay under way: the writer's window fills up
            self.num_bytes -= len(data)
            self._arrived.append(data)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self) -> None:
        await self._changed.wait()


class Connection:
    """One stream, from the router's call on. It is the router's `call` and channel, and the leader's context."""

    def __init__(self, network: SimulatedNetwork, link: Link, address: str) -> None:
        self._network, self.link, self._address = network, link, address
        self.is_silent = False
        self._up, self._down = _Pipe(self), _Pipe(self)
        self._metadata: _Metadata = ()
        self._status = grpc.StatusCode.UNAVAILABLE, "the connection broke"
        self._has_left = self._is_over_for_leader = False
        self._connecting: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        link.connections[self] = None

    # The router's side.

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._has_left = True
        self._down.end_reading()
        self._up.end_writing()
        if self._serving is not None and not self.is_silent:
            self._later(self._leave())
        self._forget_if_over()

    def stream_stream(self, method: str) -> Any:
        def call(metadata: _Metadata) -> Connection:
            self._metadata = metadata
            self._connecting = self._later(self._connect())
            return self

        return call

    async def read(self) -> bytes:
        try:
            return await self._down.read()
        except _BrokenError:
            raise _rpc_error(*self._status) from None

    async def write(self, data: bytes) -> None:
        """The router's; the leader's context is a `_Context`."""
        try:
            await self._up.write(data)
        except _BrokenError:
            raise _rpc_error(*self._status) from None

    # What happens to it.

    def cut(self, router_s: float | None, leader_s: float | None) -> None:
        """Nothing is carried any more; each side learns of it after so many seconds, None: not by this."""
        loop = asyncio.get_running_loop()
        if router_s is not None:
            loop.call_later(router_s, self.end_for_router)
        if leader_s is not None:
            loop.call_later(leader_s, self.end_for_leader)

    def notice_stall(self, router_s: float, leader_s: float) -> None:
        def unless_whole(end: Any) -> None:
            if self.is_silent or not self.link.whole.is_set():  # what one side has given up stays over for the other
                self.is_silent = True
                end()

        loop = asyncio.get_running_loop()
        loop.call_later(router_s, unless_whole, self.end_for_router)
        loop.call_later(leader_s, unless_whole, self.end_for_leader)

    def end_for_router(self) -> None:
        self._down.end_reading()
        self._up.end_writing()
        self._forget_if_over()

    def end_for_leader(self) -> None:
        self._is_over_for_leader = True
        self._up.end_reading()
        self._down.end_writing()
        if self._serving is not None:
            self._serving.cancel()
        self._forget_if_over()

    async def _connect(self) -> None:
        link = self.link
        await link.whole.wait()
        await asyncio.sleep(link.drawn_delay_s() + link.rng.uniform(0, link.connect_s))
        await link.whole.wait()
        server = self._network.servers.get(self._address)
        if self._is_over_for_leader or self.is_silent or (self._has_left and link.rng.random() < 0.5):
            self.end_for_leader()
            return
        if server is None or link.refuses:
            self._status = grpc.StatusCode.UNAVAILABLE, "connection refused"
            self.end_for_router()
            self.end_for_leader()
            return
        self._serving = self._later(self._serve(server))
        if self._has_left:  # its connect was under way when the router gave it up
            await self._leave()

    async def _leave(self) -> None:
        """The leader learns that the router has ended the call."""
        await asyncio.sleep(self.link.drawn_delay_s())
        await self.link.whole.wait()
        if not self.is_silent:
            self.end_for_leader()

    async def _serve(self, server: SimulatedServer) -> None:
        server.connections[self] = None
        try:
            await server.behaviour(self._requests(), _Context(self._down, self._metadata))
        except _AbortedError as error:
            self._status = error.status
        except _BrokenError:
            pass
        finally:
            server.connections.pop(self, None)
            self._is_over_for_leader = True
            self._up.end_reading()
            self._down.end_writing()
            if not self.is_silent:
                self._later(self._end_after_last_word())
            self._forget_if_over()

    async def _end_after_last_word(self) -> None:
        """The router reads what the leader has written, and then learns of the end."""
        for _ in range(1000):
            if not self._down.num_bytes:
                break
            await asyncio.sleep(0.01)
        self.end_for_router()

    async def _requests(self) -> AsyncIterator[bytes]:
        while True:
            try:
                yield await self._up.read()
            except _BrokenError:
                return

    def _later(self, what: Any) -> asyncio.Task[None]:
        return self._network.keep(asyncio.create_task(what))

    def _forget_if_over(self) -> None:
        if self._down.is_over_for_reader and self._is_over_for_leader:
            self.link.connections.pop(self, None)


class _AbortedError(Exception):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = code, details


class _Context:
    """What a leader's handler knows of its stream."""

    def __init__(self, down: _Pipe, metadata: _Metadata) -> None:
        self._down, self._metadata = down, metadata

    def invocation_metadata(self) -> _Metadata:
        return self._metadata

    async def write(self, data: bytes) -> None:
        await self._down.write(data)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _AbortedError(code, details)


class SimulatedServer:
    """A leader's server. `kill` ends it as the death of its process does."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network
        self._address = ""
        self.behaviour: Any = None
        self.connections: dict[Connection, None] = {}  # in an order that does not change from run to run

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        (generic,) = handlers
        self.behaviour = next(iter(generic._method_handlers.values())).stream_stream

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self._network.servers[self._address] = self

    async def stop(self, grace: float | None = None) -> None:
        self.kill()

    def kill(self) -> None:
        if self._network.servers.get(self._address) is self:
            del self._network.servers[self._address]
        for connection in [*self.connections]:
            connection.end_for_leader()


class SimulatedNetwork:
    """Links by router and leader's address, made as they are used."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.servers: dict[str, SimulatedServer] = {}
        self.links: dict[str, Link] = {}
        self._past_links: list[Link] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @contextmanager
    def in_place_of_grpc(self) -> Iterator[None]:
        with (
            mock.patch.object(grpc.aio, "insecure_channel", lambda address, options: self._channel(address)),
            mock.patch.object(grpc.aio, "server", self._server),
        ):
            yield

    def link(self, address: str) -> Link:
        if address not in self.links:
            self.links[address] = Link(random.Random(self._rng.random()))
        return self.links[address]

    def forget(self, address: str) -> None:
        """Nothing listens there any more."""
        self._past_links.append(self.links.pop(address))

    def keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Holds the task until it has ended."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ends what is still under way."""
        for link in (*self.links.values(), *self._past_links):
            for connection in [*link.connections]:
                connection.end_for_router()
                connection.end_for_leader()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _server(self, options: object) -> SimulatedServer:
        return SimulatedServer(self)

    def _channel(self, address: str) -> Connection:
        return Connection(self, self.link(address), address.partition("@")[2])


def _rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
