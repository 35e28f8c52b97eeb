"""Pages of lists, as OpenAI's API has them: `limit`, and `after`, the id of the last entry of the page before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.requests import Request

from ..loop_share import LoopShare
from .errors import invalid_value

MAX_LIMIT: Final = 10_000
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class PageRequest:
    limit: int | None = None  # None: all
    after: str | None = None  # None: from the first entry on


def page_request(request: Request) -> PageRequest:
    """What the query asks for. Raises 400."""
    told = request.query_params.get("limit")
    if told is not None and not (told.isascii() and told.isdigit() and len(told) <= 9 and 1 <= int(told) <= MAX_LIMIT):
        raise invalid_value("limit", f"{told[:20]!r} is no whole number from 1 to {MAX_LIMIT}.")
    return PageRequest(None if told is None else int(told), request.query_params.get("after"))


def page_of(names: Sequence[str], wanted: PageRequest) -> slice:
    """The part of the list that is asked for. Raises a 400 for an `after` that is not in it."""
    start = 0
    if wanted.after is not None:
        try:
            start = names.index(wanted.after) + 1
        except ValueError:
            raise invalid_value("after", f"there is no {wanted.after[:100]!r} in this list.") from None
    return slice(start, len(names) if wanted.limit is None else min(start + wanted.limit, len(names)))


async def encoded_list(entries: Sequence[msgspec.Struct | dict[str, object]], ids: Sequence[str], more: bool) -> bytes:
    """The JSON of a page, which may be long. `more`: the list goes on after it."""
    share, data = LoopShare(), bytearray()
    for entry in entries:
        data += b"," + _encode(entry)
        await share.pause()
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": more}
    return b'{"object":"list","data":[' + data[1:] + b"]," + _encode(ends)[1:]
