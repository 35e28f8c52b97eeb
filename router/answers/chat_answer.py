"""The shape of answers to /v1/chat/completions."""

from __future__ import annotations

from msgspec import UNSET

from ..generation.choice import Delta
from ..openai_api.answer_schema import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChunkUsage,
    Usage,
)
from .answer_shape import AnswerHead, WholeChoice
from .logprobs_json import ChatLogprobsJson
from .message_parts import MessageShape, WholeMessage
from .openai_logprobs import BytesOfToken, chat_logprobs
from .prompt_logprobs_json import PromptLogprobs


class ChatAnswer:
    """An `AnswerShape`. `prompt`: the tokens of the rendered messages, the same for every choice."""

    def __init__(
        self,
        head: AnswerHead,
        bytes_of: BytesOfToken,
        *,
        num_choices: int,
        prompt: list[int],
        with_logprobs: bool,
        with_token_ids: bool,
        message: MessageShape,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._head = head
        self._bytes_of = bytes_of
        self._num_choices = num_choices
        self._prompt = prompt
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._message = message
        self._num_prompt_logprobs = num_prompt_logprobs

    def opening(self, usage: ChunkUsage) -> list[ChatChunk]:
        """A chunk with the role for each choice; the first one has the prompt's tokens, too, if they are requested."""
        head = self._head
        prompts = [self._prompt if self._with_token_ids and index == 0 else UNSET for index in range(self._num_choices)]
        delta = ChatDelta(role="assistant", content="")
        return [
            ChatChunk(head.id, head.created, head.model, [ChatChunkChoice(index, delta)], usage, prompt)
            for index, prompt in enumerate(prompts)
        ]

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> ChatChunk:
        head = self._head
        choice = ChatChunkChoice(
            index,
            self._message.delta(index, delta),
            self._logprobs(delta) if delta.logprobs else None,
            self._message.finish_reason(delta.finish_reason, has_called=delta.has_called),
            delta.token_ids if self._with_token_ids else UNSET,
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return ChatChunk(head.id, head.created, head.model, [choice], usage)

    def closing(self, usage: Usage) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, head.created, head.model, [], usage)

    def gathering(self, index: int, first: WholeChoice | None) -> WholeMessage:
        prompt = None
        if first is None and self._num_prompt_logprobs is not None:
            prompt = PromptLogprobs(self._prompt, self._bytes_of, self._num_prompt_logprobs)
        return WholeMessage(ChatLogprobsJson(self._bytes_of) if self._with_logprobs else None, prompt=prompt)

    def choice(self, index: int, whole: WholeChoice) -> ChatChoice:
        assert isinstance(whole, WholeMessage)
        return ChatChoice(
            index,
            self._message.message(index, whole),
            whole.logprobs,
            self._message.finish_reason(whole.finish_reason, has_called=whole.has_called),
            whole.token_ids if self._with_token_ids else UNSET,
            whole.stop_reason,
        )

    def without_choices(self, usage: Usage, first: WholeChoice) -> ChatCompletion:
        head = self._head
        prompt = self._prompt if self._with_token_ids else UNSET
        return ChatCompletion(head.id, head.created, head.model, [], usage, prompt, first.prompt_logprobs)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.logprobs, self._bytes_of) if self._with_logprobs else None
