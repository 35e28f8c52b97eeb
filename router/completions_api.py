"""/v1/completions and /v1/chat/completions: checks a request and makes the response that will generate its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Annotated, Final, TypeVar

from msgspec import Meta
from starlette.requests import Request

from ..adapters.adapter import AdapterVersion
from ..adapters.registry.registry_view import RegistryView
from ..workers.wire.messages import AdapterRef
from .access.request_record import NUM_ANSWER_CHARS, record_of
from .accounts.account import Accounts, AnswerRequest
from .answers.answer_shape import AnswerHead, AnswerShape
from .answers.chat_answer import ChatAnswer
from .answers.completion_answer import CompletionAnswer
from .answers.generation_response import GenerationResponse, StreamStyle
from .base_model import BaseModel
from .bodies.body_limits import max_body_bytes
from .bodies.body_reader import BodyReader
from .config import CurrentConfig
from .fleet.dispatch import Dispatcher
from .generation.generation import Generation, GenerationRequest, Prompt
from .loop_share import LoopShare
from .metrics import Metrics
from .openai_api.answer_schema import ChatChunk, ChatCompletion, Completion
from .openai_api.errors import invalid_value, unsupported
from .openai_api.request_schema import ChatRequest, CompletionRequest, GenerationFields
from .openai_api.response_id import fingerprint_of, new_response_id
from .openai_api.stream_position import LAST_EVENT_ID, EventIds, StreamPosition, parse_position, wrong_position
from .openai_api.unsupported_fields import refuse_unsupported
from .requests.beams import beam_rules, check_beams
from .requests.best_of import check_best_of, with_best_of
from .requests.chat_prompt import chat_prompt
from .requests.completion_prompts import completion_prompts, count_prompts
from .requests.model_limits import check_length
from .requests.sampling_params import sampling_params, stop_strings
from .route import route
from .tenants.identity import Identity
from .text.text import TextService
from .versions.shadow_sender import ShadowSender
from .versions.version_choice import answering, key_in_trial, version_header

R = TypeVar("R", bound=GenerationFields)
Versions = Sequence[AdapterVersion | None]  # the one that answers first; None: the base

_EventId = Annotated[str, Meta(description="The last event's id that came of a stream: it goes on behind that.")]
_EVENTS: Final = {"text/event-stream": "With `stream`: an event for each chunk, and at last `[DONE]`."}
_ERRORS: Final = (
    "unsupported_parameter",
    "context_length_exceeded",
    "invalid_request",
    "model_not_found",
    "version_not_found",
    "body_timeout",
    "timeout",
    "taken_over",
    "unsupported_encoding",
    "overloaded",
    "bodies_full",
    "rate_limit_exceeded",
    "ledger_full",
    "adapter_failed",
    "gang_lost",
    "store_unavailable",
    "registry_unavailable",
)
BACKGROUND_TIER = "flex"  # OpenAI's service_tier for what may take its time
_DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions; a chat may fill the context, or the pool


class CompletionsApi:
    def __init__(
        self,
        config: CurrentConfig,
        base: BaseModel,
        dispatcher: Dispatcher,
        view: RegistryView,
        text: TextService,
        metrics: Metrics,
        accounts: Accounts,
        shadows: ShadowSender | None = None,
    ) -> None:
        self._config = config
        self._bodies = BodyReader(config.now.max_held_body_bytes, metrics)
        self._base = base
        self._dispatcher = dispatcher
        self._view = view
        self._text = text
        self._metrics = metrics
        self._accounts, self._shadows = accounts, shadows

    @route(
        "POST",
        "/v1/chat/completions",
        scope="infer",
        summary="Answer a chat.",
        headers={LAST_EVENT_ID: _EventId},
        body=ChatRequest,
        reads_body=True,
        answers={200: ChatCompletion},
        texts=_EVENTS,
        events=ChatChunk,
        errors=("invalid_messages", *_ERRORS),
    )
    async def chat(self, http: Request, identity: Identity) -> GenerationResponse:
        started_at = time.perf_counter()
        record_of(http.scope).headers = self._accounts.precheck(identity, LAST_EVENT_ID in http.headers)
        tenant = identity.name
        async with self._body(http, tenant, ChatRequest, 1) as request:
            position = self._position(http, request, tenant)
            versions = await self._resolve_versions(http, request, identity)
            if request.echo:
                raise unsupported("echo", "a chat's prompt is not repeated; leave it out.")
            if request.top_logprobs is not None and not request.logprobs:
                raise invalid_value("top_logprobs", "it needs logprobs to be true.")
            check_beams(request)
            self._check_num_sequences(1, request, "n")
            await self._base.wait_for_first_gang()
            token_ids = await chat_prompt(request, self._text, self._base.gang())
        max_tokens = request.max_completion_tokens or request.max_tokens
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        prompt = self._prompt(request, token_ids, "messages", max_tokens, num_logprobs)
        generation = self._generation(http, request, [prompt], identity)
        head, version = await self._head("chatcmpl-", request, generation, position, versions)
        generation = _of_version(generation, version, request.model)
        record_of(http.scope).answer = head.id[-NUM_ANSWER_CHARS:]
        shape = ChatAnswer(
            head,
            self._text.token_bytes,
            num_choices=request.n or 1,
            prompt=token_ids,
            with_logprobs=bool(request.logprobs),
            with_token_ids=bool(request.return_token_ids),
        )
        return await self._response(request, generation, head, position, shape, started_at, identity, version, versions)

    @route(
        "POST",
        "/v1/completions",
        scope="infer",
        summary="Complete a text.",
        headers={LAST_EVENT_ID: _EventId},
        body=CompletionRequest,
        reads_body=True,
        answers={200: Completion},
        texts=_EVENTS,
        events=Completion,
        errors=_ERRORS,
    )
    async def complete(self, http: Request, identity: Identity) -> GenerationResponse:
        started_at = time.perf_counter()
        record_of(http.scope).headers = self._accounts.precheck(identity, LAST_EVENT_ID in http.headers)
        tenant = identity.name
        async with self._body(http, tenant, CompletionRequest, self._config.now.max_sequences_per_request) as request:
            position = self._position(http, request, tenant)
            versions = await self._resolve_versions(http, request, identity)
            if request.echo and request.logprobs is not None:
                raise unsupported(
                    "echo", "the prompt's log probabilities are not computed; leave echo or logprobs out."
                )
            check_best_of(request)
            check_beams(request)
            self._check_num_sequences(count_prompts(request), request, "prompt")
            await self._base.wait_for_first_gang()
            token_lists = await completion_prompts(request, self._text, self._base.gang())
            echoes = await self._text.echoes(token_lists) if request.echo else [""] * len(token_lists)
        context = self._base.gang().max_model_len
        prompts = [
            self._prompt(
                request, ids, "prompt", _completion_length(request.max_tokens, context - len(ids)), request.logprobs
            )
            for ids in token_lists
        ]
        n = request.n or 1
        generation = self._generation(http, request, prompts, identity)
        if request.best_of is not None and request.best_of > n:
            generation = with_best_of(generation, request.best_of)
        head, version = await self._head("cmpl-", request, generation, position, versions)
        generation = _of_version(generation, version, request.model)
        record_of(http.scope).answer = head.id[-NUM_ANSWER_CHARS:]
        shape = CompletionAnswer(
            head,
            self._text.token_bytes,
            echoes=[echo for echo in echoes for _ in range(n)],
            prompts=[ids for ids in token_lists for _ in range(n)],
            with_logprobs=request.logprobs is not None,
            with_token_ids=bool(request.return_token_ids),
        )
        return await self._response(request, generation, head, position, shape, started_at, identity, version, versions)

    def _position(self, http: Request, request: GenerationFields, tenant: str) -> StreamPosition | None:
        """The position from which the client resumes a stream; None: it does not resume one. Raises a 400."""
        told = http.headers.get(LAST_EVENT_ID)
        if not told:
            return None
        if not request.stream:
            raise wrong_position("it is only allowed with stream: true.")
        return parse_position(told, tenant, self._view.stream_keys)

    def _body(self, http: Request, tenant: str, kind: type[R], num_prompts: int) -> AbstractAsyncContextManager[R]:
        """The request in the body, which has so many prompts at most. See `BodyReader.open`."""
        gang = self._base.known_gang()
        context = None if gang is None else gang.max_model_len
        max_bytes = max_body_bytes(context, num_prompts, self._config.now.max_body_bytes)
        return self._bodies.open(http, tenant, kind, max_bytes=max_bytes, context=context)

    async def _resolve_versions(self, http: Request, request: GenerationFields, identity: Identity) -> Versions:
        """The version that answers, and others as `answering` has them. Raises 404, and 400 for refused fields."""
        current = await self._base.adapter(identity.name, request.model)
        versions: Versions = [None] if current is None else answering(current, request, identity)
        record_of(http.scope).model = request.model
        refuse_unsupported(request)
        if request.stream_options is not None and not request.stream:
            raise invalid_value("stream_options", "it is only allowed with stream: true.")
        return versions

    def _check_num_sequences(self, num_prompts: int, request: GenerationFields, param: str) -> None:
        limit = self._config.now.max_sequences_per_request
        field = "best_of" if (request.best_of or 1) > (request.n or 1) else "n"
        num_sequences = num_prompts * max(request.n or 1, request.best_of or 1)
        if num_sequences > limit:
            message = f"prompts times {field} are {num_sequences} sequences: at most {limit} are accepted."
            raise invalid_value("best_of" if field == "best_of" else param, message)

    def _prompt(
        self,
        request: GenerationFields,
        token_ids: list[int],
        param: str,
        max_tokens: int | None,
        num_logprobs: int | None,
    ) -> Prompt:
        gang = self._base.gang()
        check_length(len(token_ids), max_tokens, gang, prompt_param=param)
        sampling = sampling_params(
            request, max_tokens=max_tokens, num_logprobs=num_logprobs, vocab_size=gang.vocab_size
        )
        return Prompt(token_ids, sampling)

    def _generation(
        self,
        http: Request,
        request: GenerationFields,
        prompts: list[Prompt],
        identity: Identity,
    ) -> GenerationRequest:
        """Of the base: see `_of_version`."""
        return GenerationRequest(
            prompts=prompts,
            n=request.n or 1,
            tenant=identity.name,
            adapter=None,
            stop=stop_strings(request),
            keep_token_ids=bool(request.return_token_ids),
            keep_logprobs=prompts[0].sampling.num_logprobs is not None,
            beams=beam_rules(request, prompts, self._base.gang()),
            request_id=record_of(http.scope).request_id,
            # Who gets a deleted tenant's name shares no KV with it, whatever either of them gives as salt.
            cache_salt=f"{identity.tenant.incarnation}:{request.cache_salt or ''}",
            timeout_s=request.timeout,
            weight=identity.tenant.weight,
            priority=request.priority or 0,
            is_background=identity.tenant.is_background or request.service_tier == BACKGROUND_TIER,
            is_echoed=isinstance(request, CompletionRequest) and bool(request.echo),
        )

    async def _head(
        self,
        prefix: str,
        request: GenerationFields,
        generation: GenerationRequest,
        position: StreamPosition | None,
        versions: Versions,
    ) -> tuple[AnswerHead, AdapterVersion | None]:
        """The head of a new answer and its version, or those of the answer whose stream the client resumes.

        Raises a 400 if the resumed stream belongs to another request.
        """
        share, prompts = LoopShare(), []
        for prompt in generation.prompts:
            prompts.append(fingerprint_of(prompt))
            await share.pause()

        def fingerprint(version: AdapterVersion | None) -> bytes:
            stop, digest = generation.stop.strings, None if version is None else version.digest
            return fingerprint_of(generation.tenant, digest, prompts, generation.n, stop, generation.keep_token_ids)

        version = versions[0]
        if position is None:
            response_id = new_response_id(prefix, int(time.time()), fingerprint(version))
        else:
            response_id = position.response_id
            begun = [one for one in versions if fingerprint(one) == response_id.fingerprint]
            if response_id.prefix != prefix or not begun:
                raise wrong_position(
                    "it belongs to the answer to another request: send the same body with it. A stream cannot be "
                    "resumed either if the version of the adapter that it began with is kept no more."
                )
            version = begun[0]
            self._check_position(position, generation)
        return AnswerHead(str(response_id), response_id.created, request.model), version

    def _check_position(self, position: StreamPosition, generation: GenerationRequest) -> None:
        """Raises a 400 for a position that the request's choices cannot have reached."""
        context = self._base.gang().max_model_len
        limits = [
            context - len(prompt.token_ids) if prompt.sampling.max_tokens is None else prompt.sampling.max_tokens
            for prompt in generation.prompts
            for _ in range(generation.n)
        ]
        if len(position.num_tokens) != len(limits):
            told = len(position.num_tokens)
            raise wrong_position(f"it tells of {told} choices, and the request has {len(limits)}.")
        for index, (num_tokens, limit) in enumerate(zip(position.num_tokens, limits, strict=True)):
            if num_tokens > limit:
                raise wrong_position(f"it tells of {num_tokens} tokens of choice {index}, which has at most {limit}.")

    async def _response(
        self,
        request: GenerationFields,
        generation: GenerationRequest,
        head: AnswerHead,
        position: StreamPosition | None,
        shape: AnswerShape,
        started_at: float,
        identity: Identity,
        version: AdapterVersion | None,
        versions: Versions,
    ) -> GenerationResponse:
        style = None
        if request.stream:
            event_ids = EventIds(head.id, generation.tenant, self._view.stream_keys[0])
            style = _stream_style(request, event_ids, position)
            num_seen = () if position is None else position.num_tokens
            generation = replace(generation, key=head.id, num_seen=num_seen)
            self._metrics.num_resumed_streams += position is not None
        running = Generation(generation, self._dispatcher, self._text, self._metrics, started_at)
        context = self._base.gang().max_model_len
        asked = AnswerRequest(
            identity=identity,
            response_id=head.id,
            model=request.model,
            version=version,
            user=request.user or "",
            sticky_key=key_in_trial(versions, request, identity),
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in generation.prompts),
            num_new_tokens=generation.n * sum(_num_new_tokens(prompt, context) for prompt in generation.prompts),
            num_sequences=len(running.choices),
            is_resumed=position is not None,
            is_stream=style is not None,
            progress=running.progress,
        )
        account = await self._accounts.open(asked)
        if self._shadows is not None:
            self._shadows.send(versions, request.model, generation, head.id, identity)
        response = GenerationResponse(running, shape, style, self._metrics, account)
        if version is not None:
            response.raw_headers.append(version_header(version))
        return response


def _of_version(generation: GenerationRequest, version: AdapterVersion | None, model: str) -> GenerationRequest:
    if version is None:
        return generation
    return replace(generation, adapter=AdapterRef(version.digest, dict(version.module_ranks)), adapter_name=model)


def _num_new_tokens(prompt: Prompt, context: int) -> int:
    """At most, of one sequence."""
    rest = context - len(prompt.token_ids)
    return rest if prompt.sampling.max_tokens is None else min(prompt.sampling.max_tokens, rest)


def _stream_style(request: GenerationFields, event_ids: EventIds, position: StreamPosition | None) -> StreamStyle:
    options = request.stream_options
    include_usage = options is not None and bool(options.include_usage)
    in_every_chunk = options is not None and include_usage and bool(options.continuous_usage_stats)
    return StreamStyle(event_ids, include_usage, in_every_chunk, position)


def _completion_length(asked: int | None, left: int) -> int:
    """`asked`, or else OpenAI's default of this route, or `left`, the rest of the context, if that is less."""
    return max(min(_DEFAULT_COMPLETION_TOKENS, left), 1) if asked is None else asked
