"""Bodies of requests that change something: JSON of a few kilobytes, read at once."""

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


async def small_body(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body; an empty one counts as {}. Raises 400, 408 for one that arrives too slowly, and 413."""
    body = bytearray()
    try:
        async with asyncio.timeout(_DEADLINE_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > MAX_BYTES:
                    message = f"The request's body is larger than {MAX_BYTES} bytes."
                    raise ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
                body += chunk
    except TimeoutError:
        message = f"The request's body did not come within {_DEADLINE_S:g} s."
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    return decode(body or b"{}", decoder)
