"""A TCP connection that a test can cut, as the death of a process at either end does."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Wire:
    """A TCP proxy in front of a leader. Cutting it looks like the death of the leader's process or of the router's."""

    def __init__(self, address: str) -> None:
        self.num_bytes_left: int | None = None  # of what the leader says, until the wire is cut; None: no end
        self.is_dumb = False  # what is said goes nowhere, as when the host at the other end has just died
        self._leader = address.split(":")
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        if self._server is not None:
            self._server.close()

    def interrupt(self) -> None:
        """Cuts the connections that there are; new ones are possible."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _carry(self, from_router: asyncio.StreamReader, to_router: asyncio.StreamWriter) -> None:
        from_leader, to_leader = await asyncio.open_connection(*self._leader)
        self._writers |= {to_router, to_leader}
        if self._is_cut:
            self.cut()
        with suppress(ConnectionError):
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(from_router, to_leader, is_limited=False))
                both.create_task(self._pump(from_leader, to_router, is_limited=True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_limited: bool) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 14):
                if self.is_dumb:
                    continue
                if is_limited and self.num_bytes_left is not None:
                    data = data[: self.num_bytes_left]
                    self.num_bytes_left -= len(data)
                writer.write(data)
                await writer.drain()
                if is_limited and self.num_bytes_left == 0:
                    self.cut()
        writer.close()
