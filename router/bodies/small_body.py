"""Small JSON bodies, of requests that change something and compute nothing."""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from ..openai_api.errors import ApiError
from ..openai_api.json_body import decode

T = TypeVar("T")
MAX_BYTES: Final = 16 << 10
_DEADLINE_S: Final = 10.0


async def read_small(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """What the body says; an empty one is read as {}.

    Raises 400 for a body that does not fit, 408 for one that comes too slowly, and 413 for one that is too large.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_DEADLINE_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > MAX_BYTES:
                    message = f"The request's body is larger than {MAX_BYTES} bytes."
                    raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
                body += chunk
    except TimeoutError:
        message = f"The request's body comes too slowly: {_DEADLINE_S:g} s are enough for it."
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    return decode(bytes(body) or b"{}", decoder)
