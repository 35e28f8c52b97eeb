"""The routes of completions, chats, embeddings and the like, from a request to the response that generates it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any, Final, TypeVar

from msgspec import UNSET, Meta, structs
from starlette.requests import Request

from ..adapters.adapter import AdapterVersion
from ..adapters.names import owner_of
from ..adapters.registry.registry_view import RegistryView
from ..workers.wire.messages import GangInfo, SamplingParams, TokenRules
from .answer_kinds import (
    AnswerKind,
    Chat,
    Classification,
    Embeddings,
    FormParts,
    MessageBlocks,
    PairScores,
    PromptTokens,
    Reranking,
    ResponseItems,
    TextCompletion,
)
from .anthropic import message_chat
from .anthropic.message_chat import CountedChat, CountTokensRequest, MessageChat, MessagesRequest
from .batches.line_call import LINE_ROOM, ReservedRoom, is_line
from .batches.stored_responses import StoredResponses
from .bodies.body_reader import BodyReader
from .bodies.request_decoder import max_body_bytes, refuse_unsupported
from .classification import (
    ClassifiedList,
    ClassifyRequest,
    HeadForm,
    HeadPrompts,
    RerankAnswer,
    RerankRequest,
    ScoreHeads,
    ScoreList,
    ScoreRequest,
    check_classifier,
    generates_no_text,
    num_inputs,
)
from .config import CurrentConfig
from .embeddings import EmbeddingList, EmbeddingPrompts, EmbeddingsRequest
from .fleet.dispatch import Dispatcher
from .generation.choice import EndRules
from .generation.generation import Generation, GenerationRequest, Prompt
from .generation.usage import Usage
from .grammars.grammar_check import GrammarCheck
from .http.access_log import NUM_ANSWER_CHARS, RequestRecord, record_of
from .http.auth import Identity
from .http.errors import invalid_value, unsupported
from .http.loop_turns import LoopShare, LoopTurns
from .http.route import route
from .http.stream_position import (
    LAST_EVENT_ID,
    EventIds,
    ResponseId,
    StreamPosition,
    fingerprint_of,
    new_response_id,
    parse_position,
    wrong_position,
)
from .metrics import Metrics
from .openai.answer_form import AnswerForm
from .openai.answer_schema import ChatChunk, ChatCompletion, Completion
from .openai.chat_answer import AnswerHead, StreamStyle
from .openai.chat_fields import client_name
from .openai.chat_prompt import count_prompts
from .openai.generation_response import GenerationResponse, max_answer_bytes
from .openai.request_schema import ChatRequest, CompletionRequest, GenerationFields, TranslatedChat
from .openai.sampling_params import (
    beam_rules,
    check_beams,
    check_length,
    check_num_scores,
    check_prompt_scoring,
    num_prompt_logprobs,
    sampling_params,
    stop_strings,
    token_rules,
    with_best_of,
)
from .pauses import Pauses
from .responses.response_form import ResponseForm
from .responses.response_schema import Response, ResponseChat, ResponsesRequest, StreamEvent
from .tenancy.account import Accounts, AnswerRequest
from .text.adapter_texts import AdapterTexts
from .text.text import TextService
from .versions.shadow_sender import ShadowSender
from .versions.version_choice import VERSION_HEADER, BaseModel, VersionChoice, choose_version, on_adapter, templates_of

# The id of an answer: a new one, or that of the answer whose stream the client resumes.


async def answer_id(
    prefix: str,
    generation: GenerationRequest,
    position: StreamPosition | None,
    choice: VersionChoice,
    rendering: AdapterVersion | None,
    context: int,
) -> tuple[ResponseId, VersionChoice] | None:
    """The answer's id, and the choice with the version that its stream began with. `context`: tokens of the model's.

    None: the resumed stream belongs to another request, or to a version with other templates than `rendering`, by whose
    the prompts are rendered.
    """
    share, prompts = LoopShare(), []
    for prompt in generation.prompts:
        prompts.append(fingerprint_of(prompt))
        await share.pause()

    def fingerprint(version: AdapterVersion | None) -> bytes:
        stop = generation.stop.strings
        # Of equal content that of another user's private adapter is another's answer.
        digest = None if version is None else owner_of(version.name) + version.digest
        reading = [] if generation.reader is None else generation.reader.reading.identity
        parts = [generation.tenant, digest, prompts, generation.n, stop, generation.keep_token_ids, *reading]
        return fingerprint_of(*parts)

    if position is None:
        return new_response_id(prefix, int(time.time()), fingerprint(choice.version)), choice
    response_id = position.response_id
    for candidate in choice.candidates() if response_id.prefix == prefix else ():
        has_templates = templates_of(candidate) == templates_of(rendering)
        if has_templates and fingerprint(candidate) == response_id.fingerprint:
            _check_position(position, generation, context)
            return response_id, choice.with_version(candidate)
    return None


def _check_position(position: StreamPosition, generation: GenerationRequest, context: int) -> None:
    """Raises a 400 for a position that the request's choices cannot have reached."""
    limits = [
        context - len(prompt.token_ids) if prompt.sampling.max_tokens is None else prompt.sampling.max_tokens
        for prompt in generation.prompts
        for _ in range(generation.n)
    ]
    if len(position.num_tokens) != len(limits):
        raise wrong_position(f"it has {len(position.num_tokens)} choices, and the request has {len(limits)}.")
    for index, (num_tokens, limit) in enumerate(zip(position.num_tokens, limits, strict=True)):
        if num_tokens > limit:
            raise wrong_position(f"it has {num_tokens} tokens of choice {index}, which has at most {limit}.")


R = TypeVar("R", bound=GenerationFields)

_EventId = Annotated[str, Meta(description="Id of the last event received of a stream: the answer continues after it.")]
_EVENTS: Final = {"text/event-stream": "With `stream`: an event for each chunk, then `[DONE]`."}
_ERRORS: Final = (
    "unsupported_parameter",
    "context_length_exceeded",
    "answer_too_large",
    "invalid_request",
    "model_not_found",
    "version_not_found",
    "body_timeout",
    "timeout",
    "taken_over",
    "unsupported_encoding",
    "adapter_overflow",
    "overloaded",
    "bodies_full",
    "rate_limit_exceeded",
    "ledger_full",
    "adapter_failed",
    "gang_lost",
    "store_unavailable",
    "registry_unavailable",
)
_STORED_ERRORS: Final = ("response_not_found", "insufficient_quota", "insufficient_storage", "registry_full")
_CHAT: Final = Chat()
_TEXT_COMPLETION: Final = TextCompletion()
_EMBEDDINGS: Final = Embeddings()
_CLASSIFICATION: Final = Classification()
_PAIR_SCORES: Final = PairScores()
_RERANKING: Final = Reranking()
_RESPONSE: Final = ResponseItems()
_MESSAGE: Final = MessageBlocks(MessageChat)
_TOKEN_COUNT: Final = MessageBlocks(CountedChat)
_HEAD_ROUTE: Final[dict[str, Any]] = {"scope": "infer", "reads_body": True, "needs_registry": False}
_CLASSIFY: Final[dict[str, Any]] = _HEAD_ROUTE | {
    "summary": "Classify texts, or a chat, by an adapter with a score head.",
    "body": ClassifyRequest,
    "answers": {200: ClassifiedList},
    "names": _CLASSIFICATION.names,
    "errors": ("invalid_messages", *_ERRORS),
}
_SCORE: Final[dict[str, Any]] = _HEAD_ROUTE | {
    "summary": "Score pairs of texts.",
    "body": ScoreRequest,
    "answers": {200: ScoreList},
    "names": _PAIR_SCORES.names,
    "errors": _ERRORS,
}
_RERANK: Final[dict[str, Any]] = _HEAD_ROUTE | {
    "summary": "Order documents by their relevance to a query.",
    "body": RerankRequest,
    "answers": {200: RerankAnswer},
    "names": _RERANKING.names,
    "errors": _ERRORS,
}
BACKGROUND_TIER = "flex"  # OpenAI's service_tier for requests that may wait


class CompletionsApi:
    def __init__(
        self,
        config: CurrentConfig,
        base: BaseModel,
        dispatcher: Dispatcher,
        view: RegistryView,
        text: TextService,
        texts: AdapterTexts,
        heads: ScoreHeads,
        metrics: Metrics,
        accounts: Accounts,
        bodies: BodyReader,
        shadows: ShadowSender | None = None,
        responses: StoredResponses | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        """`responses`: None: none can be stored. `pauses`: None: there are none."""
        self._config = config
        self._bodies = bodies
        self._grammars = GrammarCheck(text.special_ids)
        self._base = base
        self._dispatcher = dispatcher
        self._view = view
        self._texts, self._heads = texts, heads
        self._metrics = metrics
        self._accounts = accounts
        self._shadows, self._responses, self._pauses = shadows, responses, pauses
        self._turns = LoopTurns()

    @route(
        "POST",
        "/v1/chat/completions",
        scope="infer",
        summary="Answer a chat.",
        headers={LAST_EVENT_ID: _EventId},
        body=ChatRequest,
        reads_body=True,
        needs_registry=False,
        answers={200: ChatCompletion},
        texts=_EVENTS,
        events=ChatChunk,
        errors=("invalid_messages", *_ERRORS),
    )
    async def chat(self, http: Request, identity: Identity) -> GenerationResponse:
        return await self._answer(http, identity, _CHAT)

    @route(
        "POST",
        "/v1/completions",
        scope="infer",
        summary="Complete a text.",
        headers={LAST_EVENT_ID: _EventId},
        body=CompletionRequest,
        reads_body=True,
        needs_registry=False,
        answers={200: Completion},
        texts=_EVENTS,
        events=Completion,
        errors=_ERRORS,
    )
    async def complete(self, http: Request, identity: Identity) -> GenerationResponse:
        return await self._answer(http, identity, _TEXT_COMPLETION)

    @route(
        "POST",
        "/v1/responses",
        scope="infer",
        summary="Answer a conversation, as OpenAI's Responses API does.",
        body=ResponsesRequest,
        reads_body=True,
        needs_registry=False,
        answers={200: Response},
        texts={"text/event-stream": "With `stream`: an event for each step, the last of them with the whole answer."},
        events=StreamEvent,
        names=_RESPONSE.names,
        errors=("invalid_messages", *_STORED_ERRORS, *_ERRORS),
    )
    async def respond(self, http: Request, identity: Identity) -> GenerationResponse:
        """Nothing is stored unless operators turn that on: a next request sends the items of its conversation."""
        return await self._answer(http, identity, _RESPONSE)

    @route(
        "POST",
        "/v1/embeddings",
        scope="infer",
        summary="Embed texts.",
        body=EmbeddingsRequest,
        reads_body=True,
        needs_registry=False,
        answers={200: EmbeddingList},
        names=_EMBEDDINGS.names,
        errors=_ERRORS,
    )
    async def embed(self, http: Request, identity: Identity) -> GenerationResponse:
        return await self._answer(http, identity, _EMBEDDINGS)

    @route("POST", "/classify", **_CLASSIFY)
    @route("POST", "/v1/classify", **_CLASSIFY)
    async def classify(self, http: Request, identity: Identity) -> GenerationResponse:
        """`LABEL_0` and so on are the rows of the adapter's score head."""
        return await self._answer(http, identity, _CLASSIFICATION)

    @route("POST", "/score", **_SCORE)
    @route("POST", "/v1/score", **_SCORE)
    async def score(self, http: Request, identity: Identity) -> GenerationResponse:
        """By an adapter whose score head has one label."""
        return await self._answer(http, identity, _PAIR_SCORES)

    @route("POST", "/rerank", **_RERANK)
    @route("POST", "/v1/rerank", **_RERANK)
    @route("POST", "/v2/rerank", **_RERANK)
    async def rerank(self, http: Request, identity: Identity) -> GenerationResponse:
        """As Jina's and Cohere's APIs do, by an adapter whose score head has one label."""
        return await self._answer(http, identity, _RERANKING)

    @route(
        "POST",
        "/v1/messages",
        scope="infer",
        summary="Answer a conversation, as Anthropic's Messages API does.",
        body=MessagesRequest,
        reads_body=True,
        needs_registry=False,
        answers={200: message_chat.Message},
        texts={"text/event-stream": "With `stream`: an event for each step."},
        events=message_chat.MessageEvent,
        refusal=message_chat.error_response,
        names=_MESSAGE.names,
        errors=("invalid_messages", *_ERRORS),
    )
    async def message(self, http: Request, identity: Identity) -> GenerationResponse:
        """Errors have Anthropic's form, with OpenAI's `code` and `param`."""
        return await self._answer(http, identity, _MESSAGE)

    @route(
        "POST",
        "/v1/messages/count_tokens",
        scope="infer",
        summary="Count the tokens of a conversation's prompt.",
        body=CountTokensRequest,
        reads_body=True,
        needs_registry=False,
        refusal=message_chat.error_response,
        names=_MESSAGE.names,
        errors=("invalid_messages", *_ERRORS),
    )
    async def count_tokens(self, http: Request, identity: Identity) -> message_chat.TokenCount:
        """As `/v1/messages` would compute them. It takes the same fields, and needs no `max_tokens`."""
        record = record_of(http.scope)
        if self._accounts.precheck is not None:
            record.headers = self._accounts.precheck(identity, False)
        async with self._open_body(http, identity, _TOKEN_COUNT) as request:
            version = choose_version(await self._base.adapter(identity, request.model), request, identity).version
            record.model = request.model
            self._check(request, _TOKEN_COUNT)
            gang, text = await self._base.gang(), await self._texts.text(identity.name, version)
            prompts = await _TOKEN_COUNT.tokenize(request, text, gang, "")
            self._leave_out(record, request, prompts, _TOKEN_COUNT)
        return message_chat.TokenCount(len(prompts.token_lists[0]))

    async def _answer(self, http: Request, identity: Identity, kind: AnswerKind[R]) -> GenerationResponse:
        """All steps of a request. Each raises errors of the API, and passes on what it has decided."""
        started_at = time.perf_counter()
        record = record_of(http.scope)
        if self._pauses is not None and identity.name in self._pauses.now and not is_line(http.scope):
            identity = await self._pauses.wait(http, identity)
        if self._accounts.precheck is not None:
            record.headers = self._accounts.precheck(identity, kind.is_resumable and LAST_EVENT_ID in http.headers)
        async with self._open_body(http, identity, kind) as request:
            position = None  # from which the client resumes a stream
            if event_id := http.headers.get(LAST_EVENT_ID):
                if not kind.is_resumable:
                    raise wrong_position("these streams cannot be resumed: send the request again without it.")
                if not request.stream:
                    raise wrong_position("it is only allowed with stream: true.")
                position = parse_position(event_id, identity.name, self._view.stream_keys)
            choice = choose_version(await self._base.adapter(identity, request.model), request, identity)
            record.model = request.model
            self._check(request, kind)
            if isinstance(request, HeadPrompts):
                await self._heads.check(identity.name, check_classifier(choice.version, request))
            elif choice.version is not None and choice.version.num_labels and not isinstance(request, EmbeddingPrompts):
                raise generates_no_text(choice.version, request.model)
            gang = await self._base.gang()
            for rendering in [choice.version] if position is None else choice.renderings():
                text = await self._texts.text(identity.name, rendering)
                of_version = (request, gang) if text.end_id is None else with_end(request, gang, text.end_id)
                prompts, generation = await self._rendered(
                    *of_version, kind, identity, rendering, text, record.request_id
                )
                limit = gang.max_model_len
                if answer := await answer_id(kind.id_prefix, generation, position, choice, rendering, limit):
                    response_id, choice = answer
                    break
            else:
                raise wrong_position(
                    "it belongs to the answer to another request: send the same body with it. A stream cannot be "
                    "resumed either if the version of the adapter that it began with is kept no more."
                )
            self._leave_out(record, request, prompts, kind)
        version = None if choice.version is None else f"{choice.version.name}@{choice.version.version}"
        head = AnswerHead(str(response_id), response_id.created, request.model, UNSET if version is None else version)
        record.answer = head.id[-NUM_ANSWER_CHARS:]
        if choice.version is not None:
            generation = on_adapter(generation, choice.version, request.model)
        style = self._stream_style(request, identity, head, position)
        if style is not None and kind.is_resumable:
            num_seen = () if position is None else position.num_tokens
            generation = replace(generation, key=head.id, num_seen=num_seen)
        responses = None  # that keep the answer
        if isinstance(request, ResponseChat) and request.terms.store and self._responses is not None:
            responses = self._responses
            await responses.check(identity, len(request.items))
        room: ReservedRoom | None = http.scope.get(LINE_ROOM)  # of a batch's line
        if room is not None:
            num_repeated = int(http.headers["content-length"])  # responses show fields of their requests
            num_numbers = (
                gang.hidden_size if choice.version is None else max(gang.hidden_size, choice.version.num_labels)
            )
            await room.reserve(num_repeated + max_answer_bytes(generation, gang.max_model_len, num_numbers))
        share = LoopShare()
        running = Generation(generation, self._dispatcher, text, self._metrics, started_at, self._turns)
        await share.pause()
        account = await self._accounts.open(
            AnswerRequest(
                identity=identity,
                response_id=head.id,
                model=self._base.name if choice.version is None else request.model,
                version=choice.version,
                user=request.user or "",
                trial=choice.trial,
                num_prompt_tokens=sum(len(prompt.token_ids) for prompt in generation.prompts),
                num_new_tokens=_num_new_tokens(generation, gang.max_model_len),
                num_sequences=len(running.choices),
                is_resumed=position is not None,
                deadline=running.deadline,
                is_stream=style is not None,
                progress=running.progress,
            )
        )
        if self._shadows is not None:
            self._shadows.send(choice, generation, head.id, identity)
        form = kind.form(FormParts(head, request, prompts, text, style, running))
        complete: Callable[[Usage], Awaitable[None]] | None = None
        if responses is not None:
            complete = partial(_keep, responses, identity, request, head, form)
        elif isinstance(form, HeadForm) and choice.version is not None:
            complete = partial(self._heads.apply, identity.name, choice.version, form)
        response = GenerationResponse(
            running,
            form,
            self._metrics,
            account,
            complete,
            None if room is None else room.max_answer_bytes,
        )
        if version is not None:
            response.raw_headers.append((VERSION_HEADER, version.encode()))
        return response

    async def _rendered(
        self,
        request: R,
        gang: GangInfo,
        kind: AnswerKind[R],
        identity: Identity,
        version: AdapterVersion | None,
        text: TextService,
        request_id: str,
    ) -> tuple[PromptTokens, GenerationRequest]:
        """The prompts, and what to generate after them, in this version's `text`, with the base as model."""
        prompts = await kind.tokenize(request, text, gang, "" if version is None else version.response_template)
        response_grammar = prompts.grammar
        has_form, thinking = response_grammar is not None, prompts.thinking
        rules = await token_rules(request, text, gang, has_form=has_form, thinking=thinking)
        grammar = (
            ""
            if response_grammar is None
            else await self._grammars.lark(identity.name, response_grammar, gang.vocab_size)
        )
        generation = _generation(request, kind, prompts, rules, grammar, identity, gang, request_id)
        if len(generation.prompts) > (limit := self._config.now.max_sequences_per_request):
            generation = replace(generation, most_at_once=limit)
        return prompts, generation

    def _open_body(self, http: Request, identity: Identity, kind: AnswerKind[R]) -> AbstractAsyncContextManager[R]:
        """The request in the body. See `BodyReader.open`."""
        config = self._config.now
        gang = self._base.known_gang()
        context = None if gang is None else gang.max_model_len
        num_prompts = kind.max_prompts(config.max_sequences_per_request)
        max_bytes = max_body_bytes(context, num_prompts, config.max_body_bytes)
        responses, recall = self._responses, None
        if kind.schema is ResponseChat and responses is not None and responses.is_on and not is_line(http.scope):
            recall = partial(responses.recall, identity)
        return self._bodies.open(http, identity.name, kind.schema, max_bytes=max_bytes, context=context, recall=recall)

    def _check(self, request: R, kind: AnswerKind[R]) -> None:
        """Raises a 400 for fields that are not supported, that contradict each other, or that ask for too much."""
        refuse_unsupported(request)
        if request.stream_options is not None and not request.stream:
            raise invalid_value("stream_options", "it is only allowed with stream: true.")
        kind.check(request)
        check_beams(request)
        if num_prompt_logprobs(request) is not None:
            check_prompt_scoring(request)
        limit = self._config.now.max_sequences_per_request
        limit = max(limit, kind.max_prompts(limit))
        field = "best_of" if (request.best_of or 1) > (request.n or 1) else "n"
        num_prompts = 1
        if isinstance(request, HeadPrompts):
            num_prompts = num_inputs(request)
        elif isinstance(request, CompletionRequest):
            num_prompts = count_prompts(request)
        num_sequences = num_prompts * max(request.n or 1, request.best_of or 1)
        if num_sequences > limit:
            message = f"prompts times {field} are {num_sequences} sequences: at most {limit} are accepted."
            raise invalid_value("best_of" if field == "best_of" else kind.count_param, message)

    def _leave_out(self, record: RequestRecord, request: R, prompts: PromptTokens, kind: AnswerKind[R]) -> None:
        """Has the answer name what it does without. Raises a 400 in its place where operators want that."""
        names: list[str] = []
        places: Mapping[str, str] = {}
        if isinstance(request, TranslatedChat):
            names, places = request.left_out, request.places
        record.ignored += names
        record.ignored += [client_name(name, kind.names, places) for name in prompts.left_out]
        if record.ignored and self._config.now.strict_requests:
            error = unsupported(record.ignored[0], "it would be left out, and strict-requests is set here.")
            error.is_as_sent = True
            raise error

    def _stream_style(
        self, request: GenerationFields, identity: Identity, head: AnswerHead, position: StreamPosition | None
    ) -> StreamStyle | None:
        if not request.stream:
            return None
        self._metrics.num_resumed_streams += position is not None
        options = request.stream_options
        include_usage = options is not None and bool(options.include_usage)
        return StreamStyle(
            EventIds(head.id, identity.name, self._view.stream_keys[0]),
            include_usage,
            options is not None and include_usage and bool(options.continuous_usage_stats),
            position,
        )


async def _keep(
    responses: StoredResponses,
    identity: Identity,
    request: GenerationFields,
    head: AnswerHead,
    form: AnswerForm,
    usage: Usage,
) -> None:
    """Stores an answer of `/v1/responses`."""
    assert isinstance(request, ResponseChat) and isinstance(form, ResponseForm)
    await responses.add(identity, head.id, request.items, form.final(usage))


def with_end(request: R, gang: GangInfo, end_id: int) -> tuple[R, GangInfo]:
    """The same where this token ends answers, as do the model's own."""
    if request.ignore_eos or end_id in gang.eos_token_ids:
        return request, gang
    stops = [*(request.stop_token_ids or ()), end_id]
    extended = structs.replace(gang, eos_token_ids=(*gang.eos_token_ids, end_id))
    return structs.replace(request, stop_token_ids=stops), extended


def _generation(
    request: R,
    kind: AnswerKind[R],
    tokens: PromptTokens,
    rules: TokenRules | None,
    grammar: str,
    identity: Identity,
    gang: GangInfo,
    request_id: str,
) -> GenerationRequest:
    """What to generate, with the base as model. Raises a 400 for prompts that are too long."""
    num_scores = num_prompt_logprobs(request)

    @cache  # the only difference between prompts of a request, which may be thousands
    def sampling(max_tokens: int | None) -> SamplingParams:
        return sampling_params(
            request,
            max_tokens=max_tokens,
            num_logprobs=tokens.num_logprobs,
            num_prompt_logprobs=num_scores,
            gang=gang,
            rules=rules,
            grammar=grammar,
            pooling=tokens.pooling,
        )

    prompts, default_tokens = [], kind.default_tokens
    if default_tokens is None and (default := gang.sampling_defaults.get("max_tokens")) is not None:
        default_tokens = int(default)
    for token_ids in tokens.token_lists:
        max_tokens = tokens.max_tokens
        if max_tokens is None and default_tokens is not None:
            max_tokens = max(min(default_tokens, gang.max_model_len - len(token_ids)), 1)
        check_length(len(token_ids), max_tokens, gang, prompt_param=kind.prompt_param)
        prompts.append(Prompt(token_ids, sampling(max_tokens)))
    if num_scores is not None:
        check_num_scores(request, num_scores, tokens.token_lists)
    generation = GenerationRequest(
        prompts=prompts,
        n=request.n or 1,
        tenant=identity.name,
        adapter=None,
        stop=stop_strings(request),
        ends=EndRules(
            min_tokens=request.min_tokens or 0,
            stop_token_ids=frozenset(request.stop_token_ids or ()).difference(
                () if request.ignore_eos else gang.eos_token_ids
            ),
            shows_stop=bool(request.include_stop_str_in_output),
            shows_special_tokens=request.skip_special_tokens is False,
        ),
        keep_token_ids=bool(request.return_token_ids),
        keep_logprobs=prompts[0].sampling.num_logprobs is not None,
        beams=beam_rules(request, prompts, gang) if request.use_beam_search else (),
        request_id=request_id,
        # A tenant shares no KV with a deleted one of the same name, whatever salt either of them gives. Its own number
        # is that of its predecessors: it is not ending, or its request would not be here.
        cache_salt=f"{identity.tenant.num_ended}:{request.cache_salt or ''}",
        timeout_s=request.timeout,
        weight=identity.tenant.weight,
        priority=request.priority or 0,
        is_background=identity.tenant.is_background or request.service_tier == BACKGROUND_TIER,
        is_echoed=bool(tokens.echoes),
        reader=tokens.reader,
    )
    if request.best_of is not None and request.best_of > generation.n:
        return with_best_of(generation, request.best_of)
    return generation


def _num_new_tokens(generation: GenerationRequest, context: int) -> int:
    """The most tokens that all sequences together may generate."""
    total = 0
    for prompt in generation.prompts:
        room, max_tokens = context - len(prompt.token_ids), prompt.sampling.max_tokens
        total += room if max_tokens is None else min(max_tokens, room)
    return generation.n * total
