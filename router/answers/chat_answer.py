"""The shape of answers to /v1/chat/completions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from msgspec import UNSET

from ...workers.wire.messages import FinishReason
from ..generation.choice import Delta
from ..openai_api.answer_schema import (
    AnswerMessage,
    CalledFunction,
    CalledFunctionDelta,
    CalledTool,
    CalledToolDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChunkUsage,
    Usage,
)
from ..text.call_parsing import Call
from ..text.response_reader import TextPiece
from .chunk_form import AnswerHead, WholeChoice
from .logprobs_json import BytesOfToken, ChatLogprobsJson, LogprobsJson, PromptLogprobs, chat_logprobs

# What a delta adds to a chat's message, in OpenAI's shape.

_NUM_SHORT_ID_CHARS: Final = 9


class WholeMessage(WholeChoice):
    """All deltas of one choice of a chat, joined. `text`: the content."""

    def __init__(self, logprobs: LogprobsJson | None, prompt: PromptLogprobs | None = None) -> None:
        super().__init__(logprobs, prompt=prompt)
        self.reasoning: list[str] = []
        self._calls: list[tuple[Call, list[str]]] = []  # the first piece of each, and all arguments
        self.has_called = False

    def add(self, delta: Delta) -> None:
        super().add(delta)
        self.has_called = delta.has_called
        for piece in delta.pieces:
            if isinstance(piece, Call):
                if piece.name:
                    self._calls.append((piece, []))
                self._calls[-1][1].append(piece.arguments)
            else:
                (self._texts if piece.part == "content" else self.reasoning).append(piece.text)

    @property
    def calls(self) -> list[Call]:
        return [Call(first.number, first.name, "".join(arguments)) for first, arguments in self._calls]


@dataclass(frozen=True)
class MessageShape:
    """How calls are shown. `is_old`: as `function_call`."""

    answer_id: str
    num_id_chars: int = 24
    is_old: bool = False

    def delta(self, index: int, delta: Delta) -> ChatDelta:
        """Of the choice with this index."""
        if not delta.pieces:
            return ChatDelta(content=delta.text if delta.text else UNSET)
        reasoning = _joined(delta, "reasoning") or UNSET
        calls = _calls_of(delta)
        return ChatDelta(
            content=_joined(delta, "content") or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=UNSET if self.is_old or not calls else [self._piece(index, call) for call in calls],
            function_call=_function_piece(calls[0]) if self.is_old and calls else UNSET,
        )

    def message(self, index: int, whole: WholeMessage) -> AnswerMessage:
        """Of the choice with this index."""
        content, calls = whole.text, whole.calls
        reasoning = "".join(whole.reasoning)
        return AnswerMessage(
            content if content or not calls else None,
            reasoning=reasoning or UNSET,
            reasoning_content=reasoning or UNSET,
            tool_calls=UNSET
            if self.is_old or not calls
            else [CalledTool(self._id(index, call), _function(call)) for call in calls],
            function_call=_function(calls[0]) if self.is_old and calls else UNSET,
        )

    def finish_reason(self, reason: FinishReason | None, *, has_called: bool) -> ChatFinishReason | None:
        """The reason of an answer that was cut off stays, even if it has called tools before."""
        if reason != "stop" or not has_called:
            return reason
        return "function_call" if self.is_old else "tool_calls"

    def _id(self, index: int, call: Call) -> str:
        """Derived from the answer's id, so a resumed stream has the same ids."""
        digest = hashlib.sha256(f"{self.answer_id}/{index}/{call.number}".encode()).hexdigest()
        return digest[:_NUM_SHORT_ID_CHARS] if self.num_id_chars == _NUM_SHORT_ID_CHARS else f"call_{digest[:24]}"

    def _piece(self, index: int, call: Call) -> CalledToolDelta:
        if not call.name:
            return CalledToolDelta(call.number, UNSET, _function_piece(call))
        return CalledToolDelta(call.number, self._id(index, call), _function_piece(call), "function")


def _joined(delta: Delta, part: str) -> str:
    return "".join(piece.text for piece in delta.pieces if isinstance(piece, TextPiece) and piece.part == part)


def _calls_of(delta: Delta) -> list[Call]:
    return [piece for piece in delta.pieces if isinstance(piece, Call)]


def _function(call: Call) -> CalledFunction:
    return CalledFunction(call.name, call.arguments)


def _function_piece(call: Call) -> CalledFunctionDelta:
    return CalledFunctionDelta(call.name or UNSET, call.arguments)


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
