"""Decodes bodies of requests, of any API, to the chats and completions that they ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

import msgspec

from ..anthropic_api.message_schema import CountedChat, CountTokensRequest, MessageChat, MessagesRequest
from ..openai_api.embedding_schema import EmbeddingPrompts, EmbeddingsRequest
from ..openai_api.errors import ApiError
from ..openai_api.json_body import decode, unknown_fields
from ..openai_api.request_schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from ..openai_api.response_schema import KeptConversation, ResponseChat, ResponsesRequest
from ..requests.embedding_prompts import embedding_prompts
from ..requests.message_chat import counted_chat, message_chat
from ..requests.response_chat import response_chat
from .packed_request import BodyRequest

# Any body of this size decodes within a millisecond or two; larger ones are decoded in another process.
MAX_BYTES_ON_LOOP: Final = 64 << 10
MAX_TRANSLATED_BYTES_ON_LOOP: Final = 24 << 10
# Of a body that is translated: millions of tiny items would fit into its bytes.
MAX_OBJECTS: Final = 1 << 20

R = TypeVar("R", bound=BodyRequest)
_decode_stored: Final = msgspec.json.Decoder(dict[str, KeptConversation]).decode

BODY_KINDS: Final[tuple[type[BodyRequest], ...]] = (
    CompletionRequest,
    ChatRequest,
    ResponseChat,
    MessageChat,
    CountedChat,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingPrompts,
)
# For kinds whose bodies have another schema: that schema, and the function that makes the chat.
_TRANSLATED: Final[Mapping[type[Any], tuple[type[Any], Callable[..., Any]]]] = MappingProxyType(
    {
        ResponseChat: (ResponsesRequest, response_chat),
        MessageChat: (MessagesRequest, message_chat),
        CountedChat: (CountTokensRequest, counted_chat),
        EmbeddingPrompts: (EmbeddingsRequest, embedding_prompts),
    }
)


class RequestDecoder(Generic[R]):
    """Decodes the bodies of one kind of requests."""

    def __init__(self, kind: type[R]) -> None:
        self._schema, self._translate = _TRANSLATED.get(kind, (kind, _as_it_is))
        self._is_translated = kind in _TRANSLATED
        self.max_bytes_on_loop = MAX_TRANSLATED_BYTES_ON_LOOP if self._is_translated else MAX_BYTES_ON_LOOP
        self._json = msgspec.json.Decoder(self._schema)

    def decode(self, body: bytes | bytearray, conversations: bytes | None = None) -> R:
        """Raises a 400 for a body that does not fit the schema.

        `conversations`: JSON of the stored responses that it may refer to, for `ResponseChat` alone; see
        `response_chat`.
        """
        if self._is_translated and body.count(b"{") > MAX_OBJECTS:
            raise ApiError(413, f"The request's body has more than {MAX_OBJECTS} objects.", code="request_too_large")
        try:
            decoded = decode(body, self._json)
            request: R = (
                self._translate(decoded)
                if conversations is None
                else self._translate(decoded, _decode_stored(conversations))
            )
        except ApiError as error:
            error.is_as_sent = True
            raise
        except RecursionError as error:
            raise ApiError(400, "The request's body is nested too deeply.", code="invalid_json") from error
        return request

    def unknown_fields(self, body: bytes | bytearray) -> list[str]:
        """Names in a body that was decoded which its schema lacks."""
        return unknown_fields(body, self._schema)


def _as_it_is(request: Any) -> Any:
    return request
