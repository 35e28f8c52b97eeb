"""The kinds of answers that a prompt can get: what a chat and a completion do not have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from ..workers.wire.messages import GangInfo
from .answers.answer_shape import AnswerHead, AnswerShape
from .answers.chat_answer import ChatAnswer
from .answers.completion_answer import CompletionAnswer
from .answers.message_parts import MessageShape
from .openai_api.errors import invalid_value, unsupported
from .openai_api.request_schema import ChatRequest, CompletionRequest, GenerationFields
from .requests.best_of import check_best_of
from .requests.chat_prompt import chat_prompt
from .requests.completion_prompts import completion_prompts, count_prompts
from .requests.tool_choice import answer_reader, check_tools, is_old
from .text.response_reader import ResponseReader
from .text.text import TextService

R = TypeVar("R", bound=GenerationFields)
_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's; a chat may fill the context, or the pool


@dataclass(frozen=True)
class PromptTokens:
    """A request's prompts, tokenized."""

    token_lists: Sequence[list[int]]
    echoes: Sequence[str] = ()  # the text of each prompt, where the answer repeats it; empty: it does not
    reader: ResponseReader | None = None  # of the answers' text; None: it is shown as it is


class AnswerKind(Protocol[R]):
    """Has no state. One pipeline (`CompletionsApi`) answers all kinds."""

    schema: type[R]
    id_prefix: str
    prompt_param: str  # the field with the prompts
    count_param: str  # the field that is to blame for too many sequences

    def max_prompts(self, max_sequences: int) -> int:
        """The most prompts that a request may have, where it may have `max_sequences` sequences."""

    def num_prompts(self, request: R) -> int: ...

    def check(self, request: R) -> None:
        """Raises a 400 for fields that contradict each other."""

    async def tokenize(self, request: R, text: TextService, gang: GangInfo) -> PromptTokens:
        """Raises a 400 for a prompt that the model does not take."""

    def max_tokens(self, request: R, room: int) -> int | None:
        """The most tokens of an answer; None: the rest of the context, which is `room`."""

    def num_logprobs(self, request: R) -> int | None:
        """Alternatives to show for each token; None: no log probabilities."""

    def shape(self, head: AnswerHead, request: R, prompts: PromptTokens, text: TextService) -> AnswerShape: ...


class Chat:
    schema = ChatRequest
    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    count_param = "n"

    def max_prompts(self, max_sequences: int) -> int:
        return 1

    def num_prompts(self, request: ChatRequest) -> int:
        return 1

    def check(self, request: ChatRequest) -> None:
        if request.echo:
            raise unsupported("echo", "a chat's prompt is not repeated; leave it out.")
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid_value("top_logprobs", "it needs logprobs to be true.")
        check_tools(request)

    async def tokenize(self, request: ChatRequest, text: TextService, gang: GangInfo) -> PromptTokens:
        token_ids, prompt = await chat_prompt(request, text, gang)
        return PromptTokens([token_ids], reader=await answer_reader(request, text.answer_format, prompt))

    def max_tokens(self, request: ChatRequest, room: int) -> int | None:
        return request.max_completion_tokens or request.max_tokens

    def num_logprobs(self, request: ChatRequest) -> int | None:
        return (request.top_logprobs or 0) if request.logprobs else None

    def shape(self, head: AnswerHead, request: ChatRequest, prompts: PromptTokens, text: TextService) -> ChatAnswer:
        formats = text.answer_format
        return ChatAnswer(
            head,
            text.token_bytes,
            num_choices=request.n or 1,
            prompt=prompts.token_lists[0],
            with_logprobs=bool(request.logprobs),
            with_token_ids=bool(request.return_token_ids),
            message=MessageShape(head.id, 24 if formats is None else formats.num_id_chars, is_old(request)),
        )


class TextCompletion:
    schema = CompletionRequest
    id_prefix = "cmpl-"
    prompt_param = "prompt"
    count_param = "prompt"

    def max_prompts(self, max_sequences: int) -> int:
        return max_sequences

    def num_prompts(self, request: CompletionRequest) -> int:
        return count_prompts(request)

    def check(self, request: CompletionRequest) -> None:
        if request.echo and request.logprobs is not None:
            raise unsupported("echo", "the prompt's log probabilities are not computed; leave echo or logprobs out.")
        check_best_of(request)

    async def tokenize(self, request: CompletionRequest, text: TextService, gang: GangInfo) -> PromptTokens:
        token_lists = await completion_prompts(request, text, gang)
        return PromptTokens(token_lists, await text.echoes(token_lists) if request.echo else ())

    def max_tokens(self, request: CompletionRequest, room: int) -> int | None:
        if request.max_tokens is not None:
            return request.max_tokens
        return max(min(_DEFAULT_COMPLETION_TOKENS, room), 1)

    def num_logprobs(self, request: CompletionRequest) -> int | None:
        return request.logprobs

    def shape(
        self, head: AnswerHead, request: CompletionRequest, prompts: PromptTokens, text: TextService
    ) -> CompletionAnswer:
        n = request.n or 1
        echoes = prompts.echoes or [""] * len(prompts.token_lists)
        return CompletionAnswer(
            head,
            text.token_bytes,
            echoes=[echo for echo in echoes for _ in range(n)],
            prompts=[token_ids for token_ids in prompts.token_lists for _ in range(n)],
            with_logprobs=request.logprobs is not None,
            with_token_ids=bool(request.return_token_ids),
        )
