"""/v1/models: the base and the caller's adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from operator import attrgetter
from typing import Final, TypeVar

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..adapters.adapter import AdapterVersion
from ..adapters.names import split_selector
from ..adapters.registry.registry_view import RegistryView
from ..adapters.registry.versions.rollout import selected
from .bodies.body_reader import BodyReader
from .bodies.request_decoder import BodyRequest, max_body_bytes, refuse_unsupported
from .config import CurrentConfig
from .http.access_log import record_of
from .http.auth import Identity
from .http.errors import invalid_value, model_not_found
from .http.list_page import PAGE_QUERY, ListPage, PageRequest, list_answer, page_request, read_page
from .http.loop_turns import LoopShare
from .http.route import route
from .openai.answer_schema import Model
from .openai.chat_prompt import chat_prompt
from .openai.request_schema import DetokenizeAnswer, DetokenizeRequest, ServerVersion, TokenizeAnswer, TokenizeRequest
from .openai.sampling_params import check_num_tokens, check_text, check_token_ids, num_kept
from .text.adapter_texts import AdapterTexts
from .text.text import TextService
from .versions.version_choice import BaseModel, choose_version

OWNER_OF_BASE = "motet"
_name = attrgetter("name")


class ModelsApi:
    def __init__(self, base: BaseModel, view: RegistryView) -> None:
        self._base, self._view = base, view
        self._created_at = int(time.time())

    @route(
        "GET",
        "/v1/models",
        scope="infer",
        summary="List the models that you may ask.",
        needs_registry=False,
        query=PAGE_QUERY,
        answers={200: ListPage[Model]},
        errors=("registry_unavailable",),
    )
    async def list(self, request: Request, identity: Identity) -> Response:
        """The base first, then the adapters that the key may see, by name."""
        page_query = page_request(request)
        models: list[Model] = []
        if page_query.after is None:
            models.append(self._base_model())
            page_query = PageRequest(page_query.limit - 1)
        elif page_query.after == self._base.name:
            page_query = PageRequest(page_query.limit)
        adapters, more = await read_page(
            partial(self._view.list_adapters, identity.name, sight=identity.sight), _name, page_query
        )
        models += map(self._adapter_model, adapters)
        return await list_answer(models, [model.id for model in models], more)

    @route(
        "GET",
        "/v1/models/{model:path}",  # the name of a base may have slashes
        scope="infer",
        summary="Show a model.",
        needs_registry=False,
        errors=("model_not_found", "registry_unavailable"),
    )
    async def show(self, request: Request, identity: Identity) -> Model:
        """The base, or an adapter that the key may see."""
        name = request.path_params["model"].removesuffix("/")
        version = await self._base.adapter(identity, name)
        if version is None:
            model = structs.replace(self._base_model(), id=name)
        else:
            _, selector = split_selector(name)
            selection = version if selector is None else selected(version, selector)
            if selection is None:
                raise model_not_found(name)
            model = structs.replace(self._adapter_model(selection), id=name)
        record_of(request.scope).model = model.id
        return model

    def _base_model(self) -> Model:
        return Model(self._base.name, self._created_at, OWNER_OF_BASE, self._base.name, None, self._max_model_len())

    def _adapter_model(self, adapter: AdapterVersion) -> Model:
        base = self._base.name
        return Model(adapter.name, int(adapter.created_at), adapter.tenant, base, base, self._max_model_len())

    def _max_model_len(self) -> int | None:
        gang = self._base.known_gang()
        return gang.max_model_len if gang is not None else None


# /tokenize, /detokenize and /version, as in vLLM.

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
    def __init__(
        self,
        config: CurrentConfig,
        base: BaseModel,
        bodies: BodyReader,
        text: TextService,
        texts: AdapterTexts,
    ) -> None:
        self._config, self._base, self._bodies, self._texts = config, base, bodies, texts

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
            current = await self._current(http, identity, request.model)
            refuse_unsupported(request)
            version = choose_version(current, request, identity).version
            gang, text = await self._base.gang(), await self._texts.text(identity.name, version)
            if request.prompt is None and not request.messages:
                raise invalid_value("prompt", "a prompt or messages are needed.")
            if request.prompt is None:
                token_ids = (await chat_prompt(request, text, gang)).token_ids
            elif request.messages:
                raise invalid_value("prompt", "it cannot be combined with messages.")
            else:
                limit = None
                if request.truncate_prompt_tokens is None:
                    check_text(request.prompt, text, gang, "prompt")
                else:
                    limit = num_kept(request.truncate_prompt_tokens, request.max_tokens, gang)
                add_special_tokens = request.add_special_tokens is not False
                token_ids = await text.encode(request.prompt, add_special_tokens=add_special_tokens, limit=limit)
        answer = bytearray(_encode({"count": len(token_ids), "max_model_len": gang.max_model_len})[:-1])
        answer += b',"tokens":' + await _listed(token_ids)
        if request.return_token_strs:
            answer += b',"token_strs":' + await _listed(token_ids, text)
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
            current = await self._current(http, identity, request.model)
            gang = await self._base.gang()
            check_num_tokens(len(request.tokens), gang, "tokens")
            check_token_ids(request.tokens, gang.vocab_size, "tokens")
            tokens = [request.tokens]
            of_model = await self._texts.text(
                identity.name, choose_version(current, TokenizeRequest(model=request.model), identity).version
            )
            (text,) = await of_model.decode_all(tokens, skip_special_tokens=False)
        return Response(_encode(DetokenizeAnswer(text)), media_type="application/json")

    def _open(self, http: Request, identity: Identity, kind: type[R]) -> AbstractAsyncContextManager[R]:
        """The request in the body, with at most one prompt. See `BodyReader.open`."""
        gang = self._base.known_gang()
        context = None if gang is None else gang.max_model_len
        max_bytes = max_body_bytes(context, 1, self._config.now.max_body_bytes)
        return self._bodies.open(http, identity.name, kind, max_bytes=max_bytes, context=context)

    async def _current(self, http: Request, identity: Identity, model: str) -> AdapterVersion | None:
        """The current version of the adapter that a request names; None: the base. Raises 404."""
        if not model:
            return None
        current = await self._base.adapter(identity, model)
        record_of(http.scope).model = model
        return current


async def _listed(token_ids: Sequence[int], text: TextService | None = None) -> bytes:
    """A JSON list of the ids, or of the tokens as the vocabulary has them, which may be long."""
    share, listed = LoopShare(), bytearray()
    for start in range(0, len(token_ids), _PIECE):
        piece = token_ids[start : start + _PIECE]
        listed += b"," + _encode(piece if text is None else [*map(text.token_str, piece)])[1:-1]
        await share.pause()
    return b"[" + listed[1:] + b"]"
