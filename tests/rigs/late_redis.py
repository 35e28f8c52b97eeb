"""A way to a Redis server that delays or holds back replies: clients cannot know whether it has executed a command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from redis.asyncio.connection import parse_url


class LateRedis:
    """`url`: for clients. Replies that come while `holds_replies` never reach them, nor those on a connection on which
    a command with `marks_late` in it was sent. Others come after `delay_s` seconds, drawn for each.
    """

    def __init__(self, server: str) -> None:
        self._server = parse_url(server)
        self.holds_replies = False
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.marks_late: bytes | None = None
        self._is_late: set[asyncio.StreamWriter] = set()  # to clients
        self.num_held = 0
        self.connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.url = ""

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = writer
        task.add_done_callback(self.connections.pop)
        if "path" in self._server:
            to_server = await asyncio.open_unix_connection(self._server["path"])
        else:
            to_server = await asyncio.open_connection(self._server["host"], self._server["port"])
        both = [
            asyncio.create_task(self._pass_on(reader, to_server[1], writer, is_reply=False)),
            asyncio.create_task(self._pass_on(to_server[0], writer, writer, is_reply=True)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            for end in (writer, to_server[1]):
                end.close()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        *,
        is_reply: bool,
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not is_reply and self.marks_late is not None and self.marks_late in data:
                    self._is_late.add(client)
                if is_reply and (self.holds_replies or client in self._is_late):
                    self.num_held += 1
                    continue
                if is_reply and (delay_s := self.delay_s()):
                    await asyncio.sleep(delay_s)
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def late_redis(server: str) -> AsyncIterator[LateRedis]:
    """Between clients and the server at this URL."""
    late = LateRedis(server)
    listener = await asyncio.start_server(late.connect, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()[:2]
    late.url = f"redis://{host}:{port}"
    try:
        yield late
    finally:
        listener.close()
        await asyncio.sleep(0.01)  # what was accepted last becomes a connection
        for client in late.connections.values():
            client.close()
        while late.connections:
            await asyncio.wait(late.connections)
