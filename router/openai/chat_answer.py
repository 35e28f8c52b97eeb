"""Completions and chats on their way out: documents with choices, and streams of chunks that can be resumed.

Each event's id is the position in the stream; a client that reconnects with such an id gets the events that follow it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...workers.wire.messages import FinishReason
from ..generation.choice import Delta
from ..generation.generation import Generation
from ..generation.usage import Usage
from ..http.errors import ApiError
from ..http.stream_position import AT_USAGE, EventIds, StreamPosition, wrong_position
from ..text.call_parsing import Call
from ..text.response_reader import TextPiece
from ..text.text import Detokenizer
from .answer_schema import (
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
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from .logprobs_json import (
    BytesOfToken,
    ChatLogprobsJson,
    CompletionLogprobsJson,
    EchoedLogprobs,
    LogprobsJson,
    PromptLogprobs,
    chat_logprobs,
    completion_logprobs,
)

# The interface that the shapes of both kinds of answers, completions and chats, have in common.


@dataclass(frozen=True)
class AnswerHead:
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int  # Unix time, seconds
    model: str  # as the client named it
    system_fingerprint: str | UnsetType = UNSET  # which version of an adapter answers


_MARK: Final = b"\0"  # in place of a long field: JSON has no such byte


class AnswerShape(Protocol):
    """Turns the deltas of a request's choices into the messages of OpenAI's API."""

    def opening(self, usage: ChunkUsage) -> Sequence[msgspec.Struct]:
        """The chunks of a stream before the first delta."""

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> msgspec.Struct:
        """The chunk for a delta of the choice `index`."""

    def closing(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices that has the usage, at the end of a stream."""

    def gathering(self, index: int, first: WholeChoice | None) -> WholeChoice:
        """A collector of the deltas of one choice of a whole answer. `index`: of the choice.

        `first`: of the first choice of the same prompt, whose log-probabilities of the prompt are this one's, too.
        """

    def choice(self, index: int, whole: WholeChoice) -> msgspec.Struct:
        """The choice at this place of a whole answer."""

    def without_choices(self, usage: Usage, first: WholeChoice) -> msgspec.Struct:
        """A whole answer whose list of choices is empty. `first`: of the choices that were gathered."""


class WholeChoice:
    """All deltas of one choice, joined."""

    def __init__(
        self,
        logprobs: LogprobsJson | None,
        echoed: EchoedLogprobs | None = None,
        prompt: PromptLogprobs | None = None,
    ) -> None:
        """`logprobs`: None if none are shown. `echoed`, `prompt`: of the prompt, if they are requested."""
        self.echoed, self.prompt = echoed, prompt
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._texts: list[str] = []
        self._long: list[Iterator[bytes]] = []  # JSON of long fields, in the order of the fields
        self._logprobs = logprobs

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self._logprobs is not None and delta.logprobs:
            self._logprobs.add(delta.logprobs)
        for growing in (self.echoed, self.prompt):
            if growing is not None and delta.prompt_scores is not None:
                growing.add(delta.prompt_scores)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def logprobs(self) -> msgspec.Raw | None:
        """The placeholder of this field until `json` inserts it."""
        return None if self._logprobs is None else self._later(self._logprobs.whole())

    @property
    def prompt_logprobs(self) -> msgspec.Raw | UnsetType:
        """As `logprobs`."""
        return UNSET if self.prompt is None else self._later(self.prompt.whole())

    def json(self, encoded: bytes) -> Iterator[bytes]:
        """The encoded choice, in pieces, with the long fields that were requested since the last call, in this order.

        Joining tens of megabytes would block the event loop.
        """
        long, self._long = self._long, []
        first, *tails = encoded.split(_MARK)
        return chain([first], *(chain(pieces, [after]) for pieces, after in zip(long, tails, strict=True)))

    def _later(self, pieces: Iterator[bytes]) -> msgspec.Raw:
        self._long.append(pieces)
        return msgspec.Raw(_MARK)


_NO_CHOICES: Final = b'"choices":[]'
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class StreamStyle:
    """The options of a stream, and where it begins."""

    event_ids: EventIds
    include_usage: bool = False
    usage_in_every_chunk: bool = False
    position: StreamPosition | None = None  # what the client has already had; None: nothing


class ChunkForm:
    """An `AnswerForm`."""

    def __init__(self, shape: AnswerShape, style: StreamStyle | None, generation: Generation) -> None:
        """`style`: None for one JSON document."""
        self.is_stream = style is not None
        self._shape, self._style, self._generation = shape, style, generation
        # Of a chunk that shows none: null where the last one shows it.
        self._no_usage: ChunkUsage = None if style is not None and style.include_usage else UNSET
        self._wholes: dict[int, WholeChoice] = {}  # by the index of the choice
        num_drawn = generation.request.n
        num_answered = generation.request.num_best or num_drawn
        for index in range(0 if self.is_stream else len(generation.choices)):
            number, place = divmod(index, num_drawn)
            first = self._wholes[index - place] if place else None
            self._wholes[index] = shape.gathering(number * num_answered, first)

    def take(self, index: int, delta: Delta) -> None:
        self._wholes[index].add(delta)

    def document(self, usage: Usage) -> Iterator[bytes]:
        # Only the answer's own list can contain this: within a text its quotes would be escaped.
        before, after = _encode(self._shape.without_choices(usage, self._wholes[0])).split(_NO_CHOICES, 1)
        endings = self._wholes[0].json(after)
        yield before + b'"choices":['
        for place, index in enumerate(self._generation.answers()):
            whole = self._wholes.pop(index)  # freed before the next one: all at once would take long
            yield b"," if place else b""
            yield from whole.json(_encode(self._shape.choice(place, whole)))
        yield b"]"
        yield from endings

    def opening(self, usage: Usage, *, is_over: bool) -> Iterator[bytes]:
        style = self._style
        assert style is not None
        position = style.position
        if position is not None and position.has_usage and not is_over:
            raise wrong_position("it is the end of the answer, and the answer has not ended.")
        return self._opening(style, usage, 0 if position is None else position.num_openings)

    def _opening(self, style: StreamStyle, usage: Usage, num_had: int | None) -> Iterator[bytes]:
        """Drops the events that the client has already received; None: all of them."""
        if num_had is None:
            return
        none_yet = [0] * len(self._generation.choices)
        chunks = self._shape.opening(usage if style.usage_in_every_chunk else self._no_usage)
        suffixes = [*range(1, len(chunks)), ""]  # the last event needs no suffix: only tokens follow it
        for suffix, chunk in [*zip(suffixes, chunks, strict=False)][num_had:]:
            yield style.event_ids.line(none_yet, suffix) + _event(chunk)

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.is_empty:
            return b""
        style = self._style
        assert style is not None
        usage = self._generation.usage() if style.usage_in_every_chunk else self._no_usage
        line = style.event_ids.line(self._generation.num_tokens)
        return line + _event(self._shape.chunk(index, delta, usage))

    def ending(self, usage: Usage) -> bytes:
        style, events = self._style, b""
        assert style is not None
        if style.include_usage and not (style.position is not None and style.position.has_usage):
            events = style.event_ids.line(self._generation.num_tokens, AT_USAGE) + _event(self._shape.closing(usage))
        return events + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """No [DONE] follows, so that clients do not take the stream for complete."""
        return b"data: " + error.body() + b"\n\n"

    def refusal(self, error: ApiError) -> Response:
        return error.response()


def _event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


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
            ChatChunk(
                head.id,
                head.created,
                head.model,
                [ChatChunkChoice(index, delta)],
                usage,
                prompt,
                head.system_fingerprint,
            )
            for index, prompt in enumerate(prompts)
        ]

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> ChatChunk:
        head = self._head
        choice = ChatChunkChoice(
            index,
            self._message.delta(index, delta),
            self._logprobs(delta) if delta.logprobs else None,
            delta.finish_reason and self._message.finish_reason(delta.finish_reason, has_called=delta.has_called),
            delta.token_ids if self._with_token_ids else UNSET,
            UNSET if delta.finish_reason is None else delta.stop_reason,
        )
        return ChatChunk(head.id, head.created, head.model, [choice], usage, UNSET, head.system_fingerprint)

    def closing(self, usage: Usage) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, head.created, head.model, [], usage, UNSET, head.system_fingerprint)

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
        scores, version = first.prompt_logprobs, head.system_fingerprint
        return ChatCompletion(head.id, head.created, head.model, [], usage, prompt, scores, version)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.logprobs, self._bytes_of) if self._with_logprobs else None


# The shape of answers to /v1/completions.


class CompletionAnswer:
    """An `AnswerShape`. For each choice, `echoes` has the text of its prompt (empty: no echo), `prompts` the tokens."""

    def __init__(
        self,
        head: AnswerHead,
        bytes_of: BytesOfToken,
        *,
        echoes: Sequence[str],
        prompts: Sequence[list[int]],
        with_logprobs: bool,
        with_token_ids: bool,
        num_prompt_logprobs: int | None = None,
        num_echoed_logprobs: int | None = None,
        detokenizer: Callable[[Sequence[int]], Detokenizer] | None = None,
    ) -> None:
        """`num_prompt_logprobs`, `num_echoed_logprobs`: likely tokens beside those of the prompt; None: none at all.

        `detokenizer`: of what follows some tokens; for echoed log-probabilities.
        """
        self._head = head
        self._bytes_of = bytes_of
        self._echoes = echoes
        self._prompts = prompts
        self._with_logprobs = with_logprobs
        self._with_token_ids = with_token_ids
        self._num_prompt_logprobs, self._num_echoed_logprobs = num_prompt_logprobs, num_echoed_logprobs
        self._detokenizer = detokenizer

    def opening(self, usage: ChunkUsage) -> list[Completion]:
        """A chunk for each choice whose prompt is echoed as text or as tokens."""
        return [
            self._completion([self._choice(index, Delta(echo, [], [], None), with_prompt=True)], usage)
            for index, echo in enumerate(self._echoes)
            if echo or self._with_token_ids
        ]

    def chunk(self, index: int, delta: Delta, usage: ChunkUsage) -> Completion:
        return self._completion([self._choice(index, delta)], usage)

    def closing(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def gathering(self, index: int, first: WholeChoice | None) -> WholeChoice:
        echoed = prompt = None
        if first is not None:
            echoed, prompt = first.echoed, first.prompt
        elif self._num_echoed_logprobs is not None and self._detokenizer is not None:
            step = self._detokenizer(()).step
            echoed = EchoedLogprobs(self._prompts[index], self._bytes_of, step, self._num_echoed_logprobs)
        if first is None and self._num_prompt_logprobs is not None:
            prompt = PromptLogprobs(self._prompts[index], self._bytes_of, self._num_prompt_logprobs)
        logprobs = None
        if self._with_logprobs:
            logprobs = CompletionLogprobsJson(self._bytes_of, echoed, len(self._echoes[index]))
        return WholeChoice(logprobs, echoed, prompt)

    def choice(self, index: int, whole: WholeChoice) -> CompletionChoice:
        return CompletionChoice(
            index,
            self._echoes[index] + whole.text,
            whole.logprobs,
            whole.finish_reason,
            whole.token_ids if self._with_token_ids else UNSET,
            self._prompts[index] if self._with_token_ids else UNSET,
            whole.prompt_logprobs,
            whole.stop_reason,
        )

    def without_choices(self, usage: Usage, first: WholeChoice) -> Completion:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: ChunkUsage) -> Completion:
        head = self._head
        return Completion(head.id, head.created, head.model, choices, usage, head.system_fingerprint)

    def _choice(self, index: int, delta: Delta, *, with_prompt: bool = False) -> CompletionChoice:
        logprobs: CompletionLogprobs | None = None
        if self._with_logprobs:
            logprobs = completion_logprobs(delta.logprobs, self._bytes_of)
        reason = UNSET if delta.finish_reason is None else delta.stop_reason
        if not self._with_token_ids:
            return CompletionChoice(index, delta.text, logprobs, delta.finish_reason, stop_reason=reason)
        prompt = self._prompts[index] if with_prompt else UNSET
        return CompletionChoice(
            index, delta.text, logprobs, delta.finish_reason, delta.token_ids, prompt, stop_reason=reason
        )
