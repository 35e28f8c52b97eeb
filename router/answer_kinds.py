"""The kinds of answers that a prompt can get: what a chat and a completion do not have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from msgspec.structs import replace

from ..workers.wire.messages import GangInfo, ThinkingBudget
from ..workers.wire.prompt_scores import Pooling
from . import classification, embeddings
from .anthropic import message_chat
from .anthropic.message_form import MessageForm
from .classification import (
    ClassifyForm,
    ClassifyPrompts,
    HeadForm,
    HeadPrompts,
    PairPrompts,
    RerankForm,
    RerankPrompts,
    ScoreForm,
    classified_prompts,
    paired_prompts,
)
from .embeddings import EmbeddingForm, EmbeddingPrompts, chosen_pooling
from .generation.generation import Generation
from .grammars.response_format import WantedGrammar
from .http.errors import invalid_value, unsupported
from .openai.answer_form import AnswerForm
from .openai.chat_answer import AnswerHead, ChatAnswer, ChunkForm, CompletionAnswer, MessageShape, StreamStyle
from .openai.chat_prompt import chat_prompt, completion_prompts
from .openai.logprobs_json import named_by_id
from .openai.request_schema import ChatRequest, CompletionRequest, GenerationFields, TranslatedChat
from .openai.sampling_params import check_best_of, num_echoed_logprobs, thinking_budget
from .openai.tool_choice import (
    NO_TOOLS,
    ToolChoice,
    answer_grammar,
    answer_reader,
    formats_not_held,
    request_grammar,
    tool_choice,
)
from .responses import response_chat
from .responses.response_form import ResponseForm
from .responses.response_schema import ResponseChat
from .text.answer_format import NUM_ID_CHARS
from .text.response_reader import ResponseReader
from .text.text import TextService

R = TypeVar("R", bound=GenerationFields)
C = TypeVar("C", bound=ChatRequest)
H = TypeVar("H", bound=HeadPrompts)
P = TypeVar("P", bound=PairPrompts)
_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's; a chat may fill the context, or the pool


@dataclass(frozen=True)
class PromptTokens:
    """A request's prompts, tokenized."""

    token_lists: Sequence[list[int]]
    left_out: Sequence[str] = ()  # names of what has no part in the prompt or the answer
    echoes: Sequence[str] = ()  # the text of each prompt, where the answer repeats it; empty: it does not
    reader: ResponseReader | None = None  # of the answers' text; None: it is shown unchanged
    grammar: WantedGrammar | None = None  # the form of the answers; None: any
    max_tokens: int | None = None  # of an answer; None: the kind's default
    num_logprobs: int | None = None  # alternatives to show for each token; None: no log probabilities
    pooling: Pooling | None = None  # None: no embeddings are requested
    thinking: ThinkingBudget | None = None  # None: thoughts may go on
    num_id_chars: int = NUM_ID_CHARS  # of a call's id
    tools: ToolChoice = NO_TOOLS


class AnswerKind(Protocol[R]):
    """Has no state. One pipeline (`CompletionsApi`) answers all kinds."""

    schema: type[R]
    id_prefix: str
    prompt_param: str  # the field with the prompts
    count_param: str  # the field that is to blame for too many sequences
    default_tokens: int | None  # of an answer at most; None: the rest of the context
    is_resumable: bool  # whether a stream can go on from one of its events
    names: Mapping[str, str]  # the client's own of the request's fields: see `renamed`

    def max_prompts(self, max_sequences: int) -> int:
        """The most prompts that a request may have, where it may have `max_sequences` sequences."""

    def check(self, request: R) -> None:
        """Raises a 400 for fields that contradict each other."""

    async def tokenize(self, request: R, text: TextService, gang: GangInfo, template: str) -> PromptTokens:
        """Raises a 400 for a prompt that the model does not take.

        `template`: name of the form of answers; empty: the model's.
        """

    def form(self, parts: FormParts[R]) -> AnswerForm: ...


@dataclass(frozen=True)
class FormParts(Generic[R]):
    """What the form of an answer is made of."""

    head: AnswerHead
    request: R
    prompts: PromptTokens
    text: TextService
    style: StreamStyle | None  # None: one JSON document is requested
    generation: Generation

    @property
    def is_stream(self) -> bool:
        return self.style is not None


class OfChat(Generic[C]):
    """What all kinds of answers to chats have in common."""

    prompt_param = "messages"
    count_param = "n"
    default_tokens: int | None = None
    is_resumable = False

    def max_prompts(self, max_sequences: int) -> int:
        return 1

    def check(self, request: C) -> None:
        if request.echo:
            raise unsupported("echo", "a chat's prompt is not repeated; leave it out.")
        if request.top_logprobs and not request.logprobs:
            raise invalid_value("top_logprobs", "it needs logprobs to be true.")
        tool_choice(request)

    async def tokenize(self, request: C, text: TextService, gang: GangInfo, template: str) -> PromptTokens:
        prompt = await chat_prompt(request, text, gang)
        answers = text.answers_of(template) if template else text.answer_format
        tools, left_out = tool_choice(request), prompt.left_out
        reader = await answer_reader(request, tools, answers, prompt.continued)
        if isinstance(request, TranslatedChat):
            left_out += formats_not_held(request, tools, reader)
        thinking = None
        if request.thinking_token_budget is not None:
            thinking, is_bounded = thinking_budget(request.thinking_token_budget, reader, text)
            left_out += [] if is_bounded else ["thinking_token_budget"]
        return PromptTokens(
            [prompt.token_ids],
            left_out=left_out,
            reader=reader,
            grammar=answer_grammar(request, tools, reader),
            max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
            num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            thinking=thinking,
            num_id_chars=NUM_ID_CHARS if answers is None else answers.num_id_chars,
            tools=tools,
        )

    def shape(self, parts: FormParts[C]) -> ChatAnswer:
        request = parts.request
        return ChatAnswer(
            parts.head,
            named_by_id if request.return_tokens_as_token_ids else parts.text.token_bytes,
            num_choices=request.n or 1,
            prompt=parts.prompts.token_lists[0],
            with_logprobs=bool(request.logprobs),
            with_token_ids=bool(request.return_token_ids),
            message=MessageShape(parts.head.id, parts.prompts.num_id_chars, parts.prompts.tools.is_old),
            num_prompt_logprobs=request.prompt_logprobs,
        )


class Chat(OfChat[ChatRequest]):
    schema = ChatRequest
    id_prefix = "chatcmpl-"
    is_resumable = True
    names: Mapping[str, str] = MappingProxyType({})

    def form(self, parts: FormParts[ChatRequest]) -> ChunkForm:
        return ChunkForm(self.shape(parts), parts.style, parts.generation)


class ResponseItems(OfChat[ResponseChat]):
    """A chat, requested and answered as OpenAI's Responses API does."""

    schema = ResponseChat
    id_prefix = "resp_"
    prompt_param = "input"
    names: Mapping[str, str] = response_chat.NAMES

    def form(self, parts: FormParts[ResponseChat]) -> ResponseForm:
        request, sampling = parts.request, parts.generation.request.prompts[0].sampling
        names = [name for name in ("temperature", "top_p") if getattr(request, name) is None]  # the model's own
        request = replace(request, terms=replace(request.terms, **{name: getattr(sampling, name) for name in names}))
        return ResponseForm(parts.head, self.shape(parts), request, is_stream=parts.is_stream)


class MessageBlocks(OfChat[C]):
    """A chat, requested and answered as Anthropic's Messages API does."""

    id_prefix = "msg_"
    names: Mapping[str, str] = message_chat.NAMES

    def __init__(self, schema: type[C]) -> None:
        self.schema = schema

    def form(self, parts: FormParts[C]) -> MessageForm:
        return MessageForm(parts.head, self.shape(parts), is_stream=parts.is_stream)


class TextCompletion:
    schema = CompletionRequest
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    count_param = "prompt"
    default_tokens: int | None = _DEFAULT_COMPLETION_TOKENS
    is_resumable = True
    names: Mapping[str, str] = MappingProxyType({})

    def max_prompts(self, max_sequences: int) -> int:
        return max_sequences

    def check(self, request: CompletionRequest) -> None:
        check_best_of(request)

    async def tokenize(
        self, request: CompletionRequest, text: TextService, gang: GangInfo, template: str
    ) -> PromptTokens:
        token_lists = await completion_prompts(request, text, gang)
        skips = request.skip_special_tokens is not False
        echoes = await text.echoes(token_lists, skip_special_tokens=skips) if request.echo else ()
        return PromptTokens(
            token_lists,
            echoes=echoes,
            grammar=request_grammar(request),
            max_tokens=request.max_tokens,
            num_logprobs=request.num_logprobs,
        )

    def form(self, parts: FormParts[CompletionRequest]) -> ChunkForm:
        request, prompts = parts.request, parts.prompts
        n = request.n or 1
        echoes = prompts.echoes or [""] * len(prompts.token_lists)
        shape = CompletionAnswer(
            parts.head,
            named_by_id if request.return_tokens_as_token_ids else parts.text.token_bytes,
            echoes=[echo for echo in echoes for _ in range(n)],
            prompts=[token_ids for token_ids in prompts.token_lists for _ in range(n)],
            with_logprobs=request.num_logprobs is not None,
            with_token_ids=bool(request.return_token_ids),
            num_prompt_logprobs=request.prompt_logprobs,
            num_echoed_logprobs=num_echoed_logprobs(request),
            detokenizer=parts.text.detokenizer,
        )
        return ChunkForm(shape, parts.style, parts.generation)


class Embeddings:
    """Embeddings of prompts, without generated tokens."""

    schema = EmbeddingPrompts
    id_prefix = "embd-"
    prompt_param = "input"
    count_param = "input"
    default_tokens: int | None = None
    is_resumable = False
    names: Mapping[str, str] = embeddings.NAMES

    def max_prompts(self, max_sequences: int) -> int:
        """The most prompts of a request; `max_sequences` of them are computed at once."""
        return max(max_sequences, embeddings.MAX_INPUTS)

    def check(self, request: EmbeddingPrompts) -> None:
        """What contradicts itself was refused as the body was translated."""

    async def tokenize(
        self, request: EmbeddingPrompts, text: TextService, gang: GangInfo, template: str
    ) -> PromptTokens:
        pooling = chosen_pooling(request, text.pooling, gang)
        return PromptTokens(await completion_prompts(request, text, gang), max_tokens=0, pooling=pooling)

    def form(self, parts: FormParts[EmbeddingPrompts]) -> EmbeddingForm:
        request = parts.request
        is_normalised = request.pooling is not None or parts.text.pooling.is_normalised
        num_inputs = len(parts.prompts.token_lists)
        return EmbeddingForm(
            parts.head.model, num_inputs, request.encoding_format, request.dimensions, is_normalised=is_normalised
        )


class OfHead(Generic[H]):
    """What all kinds of answers have in common that are made by an adapter's score head, without generated tokens."""

    default_tokens: int | None = None
    is_resumable = False

    def max_prompts(self, max_sequences: int) -> int:
        """The most prompts of a request; `max_sequences` of them are computed at once."""
        return max(max_sequences, embeddings.MAX_INPUTS)

    def check(self, request: H) -> None:
        """What contradicts itself was refused as the body was translated."""


class Classification(OfHead[ClassifyPrompts]):
    schema = ClassifyPrompts
    id_prefix = "classify-"
    prompt_param = count_param = "input"
    names: Mapping[str, str] = classification.NAMES

    async def tokenize(
        self, request: ClassifyPrompts, text: TextService, gang: GangInfo, template: str
    ) -> PromptTokens:
        return PromptTokens(await classified_prompts(request, text, gang), max_tokens=0, pooling="last")

    def form(self, parts: FormParts[ClassifyPrompts]) -> HeadForm:
        return ClassifyForm(parts.head, parts.request)


class OfPairs(OfHead[P]):
    prompt_param = count_param = "documents"
    names: Mapping[str, str] = classification.PAIR_NAMES

    async def tokenize(self, request: P, text: TextService, gang: GangInfo, template: str) -> PromptTokens:
        return PromptTokens(await paired_prompts(request, text, gang), max_tokens=0, pooling="last")


class PairScores(OfPairs[PairPrompts]):
    schema = PairPrompts
    id_prefix = "score-"

    def form(self, parts: FormParts[PairPrompts]) -> HeadForm:
        return ScoreForm(parts.head, parts.request)


class Reranking(OfPairs[RerankPrompts]):
    schema = RerankPrompts
    id_prefix = "rerank-"

    def form(self, parts: FormParts[RerankPrompts]) -> HeadForm:
        return RerankForm(parts.head, parts.request)
