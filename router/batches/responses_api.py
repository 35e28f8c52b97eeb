"""/v1/responses/{response_id}: what is stored of a response, by the caller's own requests."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from ..openai_api.errors import NoSuchResponse, unsupported
from ..openai_api.list_page import PAGE_QUERY, list_answer, page_request
from ..openai_api.response_schema import DeletedResponse, InputItemList, Response
from ..requests.stored_items import input_page
from ..route import route
from ..tenants.identity import Identity
from .file_content import FileContent
from .ownership import ORDER_QUERY, requested_order
from .stored_responses import StoredResponses

_RESPONSE: Final = "/v1/responses/{response_id}"
_STREAM: Final = "stream"
_PAGE_SIZE: Final = 20  # OpenAI's
_ITEMS_QUERY: Final[dict[str, Any]] = {
    **PAGE_QUERY,
    ORDER_QUERY: Annotated[str, Meta(pattern="^(asc|desc)$", description="The newest first, unless asc.")],
}


class ResponsesApi:
    def __init__(self, responses: StoredResponses) -> None:
        self._responses = responses

    @route(
        "GET",
        _RESPONSE,
        scope="infer",
        summary="Show a stored response.",
        query={_STREAM: Annotated[str, Meta(description="Refused but false.")]},
        answers={200: Response},
        errors=("response_not_found", "registry_unavailable", "unsupported_parameter"),
    )
    async def show(self, request: Request, identity: Identity) -> FileContent:
        """As it was answered. A user sees its own, keys that are no user's those of such keys, administrators all."""
        if request.query_params.get(_STREAM, "false") != "false":
            raise unsupported(_STREAM, "what is stored is sent as one document: leave it out.")
        record = await self._responses.find(identity, request.path_params["response_id"])
        return await self._responses.open(record)

    @route(
        "GET",
        f"{_RESPONSE}/input_items",
        scope="infer",
        summary="List the items that a stored response answers.",
        query=_ITEMS_QUERY,
        answers={200: InputItemList},
        errors=("response_not_found", "registry_unavailable"),
    )
    async def input_items(self, request: Request, identity: Identity) -> HttpResponse:
        """Those of the conversation before it included. Of long ones a page has fewer."""
        wanted, is_ascending = page_request(request), requested_order(request)
        limit = wanted.limit if "limit" in request.query_params else _PAGE_SIZE
        record = await self._responses.find(identity, request.path_params["response_id"])
        read = partial(input_page, response_id=record.id, after=wanted.after, limit=limit, is_ascending=is_ascending)
        page, more = await self._responses.with_conversation(record, read)
        return await list_answer(page, [item.id for item in page], more)

    @route(
        "DELETE",
        _RESPONSE,
        scope="infer",
        summary="Delete a stored response.",
        errors=("response_not_found", "registry_unavailable"),
    )
    async def delete(self, request: Request, identity: Identity) -> DeletedResponse:
        """Later ones of its conversation stay, with all that they answer."""
        record = await self._responses.find(identity, request.path_params["response_id"])
        if not await self._responses.remove(record.tenant_id, record.id):
            raise NoSuchResponse()
        return DeletedResponse(id=record.id)
