"""A tenant with a valid key who does everything that once hurt others, all at once and without end."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import httpx

_TIMEOUT_S = 120.0


class HostileTenant:
    def __init__(self, url: str, key: str, model: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._key, self._model = key, model
        self._draw = random.Random(0)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=200),
        )
        self.num_attacks = 0

    async def attack_forever(self) -> None:
        attacks: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._flood, 8),
            (self._large_body, 2),
            (self._slow_headers, 50),
            (self._slow_body, 10),
            (self._slow_upload, 4),
            (self._stop_strings, 4),
            (self._unread_stream, 4),
            (self._garbage, 2),
        ]
        async with asyncio.TaskGroup() as tasks:
            for attack, count in attacks:
                for _ in range(count):
                    tasks.create_task(self._repeat(attack))

    async def close(self) -> None:
        await self._http.aclose()

    async def _repeat(self, attack: Callable[[], Awaitable[None]]) -> None:
        while True:
            self.num_attacks += 1
            try:
                await attack()
            except (httpx.HTTPError, OSError, asyncio.IncompleteReadError, TimeoutError):
                pass  # refused and cut off, as should be
            await asyncio.sleep(0.05)

    async def _chat(self, **given: object) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": "Count to ten."}], **given}
        await self._http.post("/v1/chat/completions", json=body)

    async def _flood(self) -> None:
        await self._chat(n=16, max_tokens=200, ignore_eos=True)

    async def _stop_strings(self) -> None:
        await self._chat(n=8, max_tokens=200, ignore_eos=True, stop=["a" * 2999 + "b"] * 4)

    async def _large_body(self) -> None:
        body = b'{"model":"x","messages":[],"tools":[' + b"[]," * 4_000_000 + b"[]]}"
        await self._http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})

    async def _garbage(self) -> None:
        await self._http.post("/v1/chat/completions", content=os.urandom(20_000))
        await self._raw(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-request-id: \xff\r\n\r\n", read=True)

    async def _slow_headers(self) -> None:
        await self._raw(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", then=b"x-more: y\r\n", every_s=2.0)

    async def _slow_body(self) -> None:
        head = self._head("/v1/chat/completions", "application/json", 1_000_000)
        await self._raw(head + b"[" * 900_000, then=b" ", every_s=2.0)

    async def _slow_upload(self) -> None:
        head = self._head("/v1/adapters", "multipart/form-data; boundary=x", 1_000_000)
        await self._raw(head + b"--x\r\n", then=b"a", every_s=5.0)

    async def _unread_stream(self) -> None:
        body = {"model": self._model, "prompt": "Count", "max_tokens": 400, "stream": True, "logprobs": 5, "n": 4}
        data = json.dumps(body | {"ignore_eos": True}).encode()
        await self._raw(self._head("/v1/completions", "application/json", len(data)) + data, then=b"", every_s=5.0)

    def _head(self, path: str, kind: str, length: int) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {self._key}",
            f"Content-Type: {kind}",
            f"Content-Length: {length}",
        ]
        return "\r\n".join([*lines, "", ""]).encode()

    async def _raw(self, data: bytes, then: bytes = b"", every_s: float = 0.0, read: bool = False) -> None:
        """Sends bytes, and then few more from time to time, for a minute or until it is cut off."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            async with asyncio.timeout(60.0):
                writer.write(data)
                await writer.drain()
                if read:
                    await reader.read(65536)
                    return
                while not writer.is_closing():
                    await asyncio.sleep(every_s)
                    writer.write(then)
                    await writer.drain()
        finally:
            writer.close()
