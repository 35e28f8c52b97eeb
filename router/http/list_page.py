"""Pages of lists, as OpenAI's API has them: `limit`, and `after`, the id of the last entry of the page before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...adapters.registry.registry import PAGE_SIZE
from .errors import invalid_value
from .loop_turns import LoopShare

MAX_LIMIT: Final = 10_000  # entries, some 5 MB
Entry = TypeVar("Entry")
_encode: Final = msgspec.json.Encoder().encode
PAGE_QUERY: Final[dict[str, Any]] = {
    "limit": Annotated[int, Meta(ge=1, le=MAX_LIMIT, description="At most so many entries.")],
    "after": Annotated[str, Meta(description="The id or name of the previous page's last entry.")],
}


class ListPage(msgspec.Struct, Generic[Entry], frozen=True, kw_only=True):
    """A page of a list."""  # the API's description; `list_answer` writes it

    object: Literal["list"] = "list"
    data: list[Entry]
    first_id: str | None  # null: the page is empty
    last_id: str | None
    has_more: bool  # another page follows


@dataclass(frozen=True)
class PageRequest:
    limit: int = MAX_LIMIT
    after: str | None = None  # None: from the first entry on


def page_request(request: Request) -> PageRequest:
    """What the query asks for. Raises 400."""
    limit = request.query_params.get("limit")
    if limit is not None and not (
        limit.isascii() and limit.isdigit() and len(limit) <= 9 and 1 <= int(limit) <= MAX_LIMIT
    ):
        raise invalid_value("limit", f"{limit[:20]!r} is not a whole number from 1 to {MAX_LIMIT}.")
    return PageRequest(MAX_LIMIT if limit is None else int(limit), request.query_params.get("after") or None)


async def read_page(
    read: Callable[[str, int], Awaitable[Sequence[Entry]]], name_of: Callable[[Entry], str], page_query: PageRequest
) -> tuple[list[Entry], bool]:
    """The entries that are requested, and whether there are more after them.

    `read` gives entries sorted by name, after a name, at most the number that it is called with. That name need not be
    there any more: a client that reads page after page misses nothing when an entry is deleted meanwhile.
    """
    entries: list[Entry] = []
    after, limit = page_query.after or "", page_query.limit
    while len(entries) <= limit:  # one more than wanted shows that there are more
        size = min(PAGE_SIZE, limit + 1 - len(entries))
        page = await read(after, size)
        entries += page
        if len(page) < size:
            break
        after = name_of(page[-1])
    return entries[:limit], len(entries) > limit


async def list_answer(entries: Iterable[msgspec.Struct], ids: Sequence[str], more: bool) -> Response:
    """A page, which may be long, as JSON. `more`: the list goes on after it."""
    share, data = LoopShare(), bytearray()
    for entry in entries:
        data += b"," + _encode(entry)
        await share.pause()
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None, "has_more": more}
    body = b'{"object":"list","data":[' + data[1:] + b"]," + _encode(ends)[1:]
    return Response(body, media_type="application/json")
