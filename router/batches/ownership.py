"""Whose a file or a batch is: they hold prompts and answers, so they are separated as usage is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from starlette.requests import Request

from ...adapters.registry.batches.records import BatchRecord, FileRecord
from ..openai_api.errors import invalid_value
from ..tenants.identity import Identity

Record = TypeVar("Record", FileRecord, BatchRecord)
ORDER_QUERY: Final = "order"


def sees(identity: Identity, record: FileRecord | BatchRecord) -> bool:
    """A user sees its own, a key of no user those of such keys, an administrator all of the tenant."""
    return identity.is_admin or record.user == identity.user


async def page_of(
    pages: AsyncIterator[Sequence[Record]], limit: int, is_shown: Callable[[Record], bool]
) -> tuple[list[Record], bool]:
    """The first records that are shown, and whether more follow."""
    shown: list[Record] = []
    async for page in pages:
        shown += filter(is_shown, page)
        if len(shown) > limit:
            break
    return shown[:limit], len(shown) > limit


def requested_order(request: Request) -> bool:
    """Whether the oldest are to come first. Raises 400."""
    order = request.query_params.get(ORDER_QUERY, "desc")
    if order not in ("asc", "desc"):
        raise invalid_value(ORDER_QUERY, "it is asc or desc.")
    return order == "asc"
