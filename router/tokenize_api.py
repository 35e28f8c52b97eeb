"""/tokenize, /detokenize and /version, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from .access.request_record import record_of
from .base_model import BaseModel
from .bodies.body_limits import max_body_bytes
from .bodies.body_reader import BodyReader
from .bodies.packed_request import BodyRequest
from .config import CurrentConfig
from .loop_share import LoopShare
from .openai_api.errors import invalid_value
from .openai_api.tokenize_schema import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ServerVersion,
    TokenizeAnswer,
    TokenizeRequest,
)
from .openai_api.unsupported_fields import refuse_unsupported
from .requests.chat_prompt import chat_prompt
from .requests.model_limits import check_num_tokens, check_text, check_token_ids, num_kept
from .route import route
from .tenants.identity import Identity
from .text.text import TextService

_ERRORS: Final = (
    "model_not_found",
    "context_length_exceeded",
    "unsupported_encoding",
    "bodies_full",
    "gang_lost",
    "registry_unavailable",
)
_PIECE: Final = 4096  # tokens that are encoded in one piece
_encode: Final = msgspec.json.Encoder().encode

R = TypeVar("R", bound=BodyRequest)


class TokenizeApi:
    def __init__(self, config: CurrentConfig, base: BaseModel, bodies: BodyReader, text: TextService) -> None:
        self._config, self._base, self._bodies, self._text = config, base, bodies, text

    @route("GET", "/version", scope="infer", summary="The version of this motet.")
    async def version(self, request: Request, identity: Identity) -> ServerVersion:
        return ServerVersion(__version__)

    @route(
        "POST",
        "/tokenize",
        scope="infer",
        summary="The tokens of a text, or of a chat's prompt.",
        body=TokenizeRequest,
        reads_body=True,
        needs_registry=False,
        answers={200: TokenizeAnswer},
        errors=("unsupported_parameter", "invalid_messages", *_ERRORS),
    )
    async def tokenize(self, http: Request, identity: Identity) -> Response:
        """The same tokens as for this prompt in `/v1/completions`, or for these messages in `/v1/chat/completions`."""
        async with self._open(http, identity, TokenizeRequest) as request:
            await self._check_model(http, identity, request.model)
            refuse_unsupported(request)
            gang, text = self._base.gang(), self._text.of(identity.name)
            if request.prompt is None and not request.messages:
                raise invalid_value("prompt", "a prompt or messages are needed.")
            if request.prompt is None:
                token_ids = (await chat_prompt(request, text, gang)).token_ids
            elif request.messages:
                raise invalid_value("prompt", "it cannot be combined with messages.")
            else:
                most = num_kept(request.truncate_prompt_tokens, request.max_tokens, gang)
                if most is None:
                    check_text(request.prompt, text, gang, "prompt")
                add_special_tokens = request.add_special_tokens is not False
                token_ids = await text.encode(request.prompt, add_special_tokens=add_special_tokens, most=most)
        answer = bytearray(_encode({"count": len(token_ids), "max_model_len": gang.max_model_len})[:-1])
        answer += b',"tokens":' + await _listed(token_ids)
        if request.return_token_strs:
            answer += b',"token_strs":' + await _listed(token_ids, self._text)
        return Response(bytes(answer + b"}"), media_type="application/json")

    @route(
        "POST",
        "/detokenize",
        scope="infer",
        summary="The text of tokens.",
        body=DetokenizeRequest,
        reads_body=True,
        needs_registry=False,
        answers={200: DetokenizeAnswer},
        errors=_ERRORS,
    )
    async def detokenize(self, http: Request, identity: Identity) -> Response:
        """The text, including that of special tokens."""
        async with self._open(http, identity, DetokenizeRequest) as request:
            await self._check_model(http, identity, request.model)
            gang = self._base.gang()
            check_num_tokens(len(request.tokens), gang, "tokens")
            check_token_ids(request.tokens, gang.vocab_size, "tokens")
            tokens = [request.tokens]
            (text,) = await self._text.of(identity.name).decode_all(tokens, skip_special_tokens=False)
        return Response(_encode(DetokenizeAnswer(text)), media_type="application/json")

    def _open(self, http: Request, identity: Identity, kind: type[R]) -> AbstractAsyncContextManager[R]:
        """The request in the body, with at most one prompt. See `BodyReader.open`."""
        gang = self._base.known_gang()
        context = None if gang is None else gang.max_model_len
        max_bytes = max_body_bytes(context, 1, self._config.now.max_body_bytes)
        return self._bodies.open(http, identity.name, kind, max_bytes=max_bytes, context=context)

    async def _check_model(self, http: Request, identity: Identity, model: str) -> None:
        """Adapters use the base's tokenizer, so the name must only exist. Raises 404."""
        if model:
            await self._base.adapter(identity, model)
            record_of(http.scope).model = model
        await self._base.wait_for_first_gang()


async def _listed(token_ids: Sequence[int], text: TextService | None = None) -> bytes:
    """A JSON list of the ids, or of the tokens as the vocabulary has them, which may be long."""
    share, listed = LoopShare(), bytearray()
    for start in range(0, len(token_ids), _PIECE):
        piece = token_ids[start : start + _PIECE]
        listed += b"," + _encode(piece if text is None else [*map(text.token_str, piece)])[1:-1]
        await share.pause()
    return b"[" + listed[1:] + b"]"
