"""HTTP requests as bytes, so that a client costs little beside the router that it measures or attacks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping

from motet.benchmarks.rigs.front_router import BASE

_BOUNDARY = "0123456789abcdef"


def completion(key: str) -> bytes:
    """A request for a few tokens, with a new connection each."""
    body = json.dumps({"model": BASE, "prompt": [10, 11, 12], "max_tokens": 4}).encode()
    return _request("/v1/completions", key, "application/json", body)


def upload(key: str, name: str, config: Mapping[str, object], tensors: bytes) -> bytes:
    parts = {"name": name.encode(), "adapter_config.json": json.dumps(config).encode()}
    parts["adapter_model.safetensors"] = tensors
    body = b"".join(
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{part}"\r\n\r\n'.encode() + data + b"\r\n"
        for part, data in parts.items()
    )
    return _request(
        "/v1/adapters", key, f"multipart/form-data; boundary={_BOUNDARY}", body + f"--{_BOUNDARY}--\r\n".encode()
    )


def _request(path: str, key: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: router\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, request: bytes) -> tuple[int, float]:
    """The answer's status, and the seconds from connecting to its end."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
    return int(answer.split(b" ", 2)[1]), time.perf_counter() - began
