"""Answers in the format of OpenAI's Responses API: the answer to a chat as items and events.

A whole answer is the last event's response of the same stream, so both have the same content.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET
from starlette.responses import Response as HttpResponse

from ..generation.choice import Delta
from ..generation.usage import Usage
from ..http.errors import ApiError, invalid_value
from ..openai.answer_form import Spoken, named_event, spoken_in
from ..openai.answer_schema import ChatTokenLogprob
from ..openai.chat_answer import AnswerHead, ChatAnswer
from ..text.response_reader import TextPiece
from . import response_schema as schema
from .response_chat import input_of
from .response_schema import ItemStatus, OutputItem, ResponseChat, StreamEvent

# The items of a response under way: the events of each item's start, additions and end.

_encode: Final = msgspec.json.Encoder().encode


@dataclass
class ItemPosition:
    """Where an item is in its response."""

    numbers: Iterator[int]  # of all events of the response
    index: int
    item_id: str

    def of_item(self) -> dict[str, Any]:
        """The fields of an event that have the item itself."""
        return {"sequence_number": next(self.numbers), "output_index": self.index}

    def in_item(self) -> dict[str, Any]:
        return {**self.of_item(), "item_id": self.item_id}


class GrowingItem(Protocol):
    place: ItemPosition

    def item(self, status: ItemStatus) -> OutputItem:
        """The item so far; it is empty while it is in progress."""

    def opening(self) -> Iterator[StreamEvent]:
        """The events after `ItemAdded` and before those of the additions."""

    def closing(self) -> Iterator[StreamEvent]:
        """The events after those of the additions and before `ItemDone`."""


@dataclass
class GrowingMessage:
    place: ItemPosition
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)  # JSON; encoding that of thousands of tokens at once takes long

    def item(self, status: ItemStatus) -> schema.OutputMessage:
        return schema.OutputMessage(self.place.item_id, status, () if status == "in_progress" else [self._part()])

    def opening(self) -> Iterator[StreamEvent]:
        yield schema.PartAdded(**self.place.in_item(), part=schema.OutputText(""))

    def add(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> StreamEvent:
        self.texts.append(text)
        if logprobs:
            self.logprobs.append(_encode(logprobs)[1:-1])
        return schema.TextDelta(**self.place.in_item(), delta=text, logprobs=logprobs)

    def closing(self) -> Iterator[StreamEvent]:
        part = self._part()
        yield schema.TextDone(**self.place.in_item(), text=part.text, logprobs=part.logprobs)
        yield schema.PartDone(**self.place.in_item(), part=part)

    def _part(self) -> schema.OutputText:
        return schema.OutputText("".join(self.texts), logprobs=msgspec.Raw(b"[" + b",".join(self.logprobs) + b"]"))


@dataclass
class GrowingReasoning:
    place: ItemPosition
    texts: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> schema.ReasoningItem:
        return schema.ReasoningItem(self.place.item_id, status, () if status == "in_progress" else [self._part()])

    def opening(self) -> Iterator[StreamEvent]:
        yield schema.PartAdded(**self.place.in_item(), part=schema.ReasoningText(""))

    def add(self, text: str) -> StreamEvent:
        self.texts.append(text)
        return schema.ReasoningDelta(**self.place.in_item(), delta=text)

    def closing(self) -> Iterator[StreamEvent]:
        yield schema.ReasoningDone(**self.place.in_item(), text=self._part().text)
        yield schema.PartDone(**self.place.in_item(), part=self._part())

    def _part(self) -> schema.ReasoningText:
        return schema.ReasoningText("".join(self.texts))


@dataclass
class GrowingCall:
    place: ItemPosition
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus) -> schema.FunctionCallItem | schema.CustomCallItem:
        arguments = "".join(self.pieces)
        return schema.FunctionCallItem(self.place.item_id, status, self.call_id, self.name, arguments)

    def opening(self) -> Iterator[StreamEvent]:
        return iter(())

    def add(self, arguments: str) -> Iterator[StreamEvent]:
        self.pieces.append(arguments)
        yield schema.ArgumentsDelta(**self.place.in_item(), delta=arguments)

    def closing(self) -> Iterator[StreamEvent]:
        yield schema.ArgumentsDone(**self.place.in_item(), name=self.name, arguments="".join(self.pieces))


@dataclass
class GrowingCustomCall(GrowingCall):
    """A call whose only argument is a text. It is shown once it is whole."""

    def item(self, status: ItemStatus) -> schema.CustomCallItem:
        return schema.CustomCallItem(self.place.item_id, status, self.call_id, self.name, self._input())

    def add(self, arguments: str) -> Iterator[StreamEvent]:
        self.pieces.append(arguments)
        return iter(())

    def closing(self) -> Iterator[StreamEvent]:
        yield schema.InputDelta(**self.place.in_item(), delta=self._input())
        yield schema.InputDone(**self.place.in_item(), input=self._input())

    def _input(self) -> str:
        return input_of("".join(self.pieces))


class ResponseForm:
    """An `AnswerForm`."""

    def __init__(self, head: AnswerHead, chat: ChatAnswer, request: ResponseChat, *, is_stream: bool) -> None:
        self.is_stream = is_stream
        self._head, self._chat, self._request = head, chat, request
        terms: dict[str, Any] = msgspec.structs.asdict(request.terms)
        try:  # once for all events
            self._terms = {
                **terms,
                "tools": msgspec.Raw(_encode(terms["tools"])),
                "text": msgspec.Raw(_encode(terms["text"])),
            }
        except RecursionError as error:
            raise invalid_value("tools", "they are nested too deeply.") from error
        self._numbers = count()
        self._done: list[schema.OutputItem] = []
        self._growing: GrowingItem | None = None
        self._is_cut = False  # the answer has as many tokens as it may have
        self._last: list[StreamEvent] | None = None  # events behind those of the deltas, once they are known
        self._end_response: schema.Response | None = None

    def take(self, index: int, delta: Delta) -> None:
        for _ in self._events(spoken_in(delta, self._chat)):
            pass

    def document(self, usage: Usage) -> Iterator[bytes]:
        yield self.final(usage)

    def final(self, usage: Usage) -> bytes:
        """JSON of the whole response, as it is stored. After that only `document`, `ending` or `failure` may come."""
        return _encode(self._ended(usage))

    def opening(self, usage: Usage, *, is_over: bool) -> Iterator[bytes]:
        initial_response = self._response("in_progress")
        yield named_event(schema.Created(sequence_number=next(self._numbers), response=initial_response))
        yield named_event(schema.InProgress(sequence_number=next(self._numbers), response=initial_response))

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.is_empty:
            return b""
        return b"".join(map(named_event, self._events(spoken_in(delta, self._chat))))

    def ending(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        kind = schema.Incomplete if self._is_cut else schema.Completed
        return self._taken_last() + named_event(kind(sequence_number=next(self._numbers), response=response))

    def failure(self, error: ApiError) -> bytes:
        detail = error.detail
        code: Any = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status_code, "server_error")
        failed = self._response("failed", error=schema.ResponseError(code, detail.message), store=False)
        error_event = schema.ErrorEvent(
            sequence_number=next(self._numbers), message=detail.message, code=detail.code, param=detail.param
        )
        last = schema.Failed(sequence_number=next(self._numbers), response=failed)
        return self._taken_last() + named_event(error_event) + named_event(last)

    def refusal(self, error: ApiError) -> HttpResponse:
        return error.response()

    def _events(self, spoken: Spoken) -> Iterator[StreamEvent]:
        self._is_cut = spoken.finish_reason == "length"
        logprobs = spoken.logprobs
        for part in spoken.parts:
            if not isinstance(part, TextPiece):
                if part.id is not UNSET and part.function.name is not UNSET:
                    name = part.function.name
                    if name in self._request.custom_tools:
                        yield from self._begin(GrowingCustomCall(self._place("ctc"), part.id, name))
                    else:
                        yield from self._begin(GrowingCall(self._place("fc"), part.id, name))
                assert isinstance(self._growing, GrowingCall)
                if part.function.arguments:
                    yield from self._growing.add(part.function.arguments)
            elif part.part == "reasoning":
                if not isinstance(thought := self._growing, GrowingReasoning):
                    thought = GrowingReasoning(self._place("rs"))
                    yield from self._begin(thought)
                yield thought.add(part.text)
            else:
                if not isinstance(message := self._growing, GrowingMessage):
                    message = GrowingMessage(self._place("msg"))
                    yield from self._begin(message)
                yield message.add(part.text, logprobs)
                logprobs = ()
        if logprobs and isinstance(self._growing, GrowingMessage):
            yield self._growing.add("", logprobs)

    def _last_events(self) -> Iterator[StreamEvent]:
        if self._growing is None:  # an answer without tokens to show has an empty text
            yield from self._begin(GrowingMessage(self._place("msg")))
        yield from self._end("incomplete" if self._is_cut else "completed")

    def _begin(self, item: GrowingItem) -> Iterator[StreamEvent]:
        yield from self._end("completed")
        self._growing = item
        yield schema.ItemAdded(**item.place.of_item(), item=item.item("in_progress"))
        yield from item.opening()

    def _end(self, status: schema.ItemStatus) -> Iterator[StreamEvent]:
        item, self._growing = self._growing, None
        if item is not None:
            yield from item.closing()
            self._done.append(item.item(status))
            yield schema.ItemDone(**item.place.of_item(), item=self._done[-1])

    def _place(self, prefix: str) -> ItemPosition:
        index = len(self._done) + (self._growing is not None)
        return ItemPosition(self._numbers, index, f"{prefix}_{self._head.id.partition('_')[2]}_{index}")

    def _ended(self, usage: Usage) -> schema.Response:
        """The whole response; made once, so what is sent is what is stored."""
        if self._end_response is None:
            self._last = [*self._last_events()]
            more: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
            if self._is_cut:
                details = schema.IncompleteDetails("max_output_tokens")
                more = {"status": "incomplete", "incomplete_details": details}
            self._end_response = self._response(usage=usage, **more)
        return self._end_response

    def _taken_last(self) -> bytes:
        """The events that were kept in `_last`, once."""
        events, self._last = self._last or (), None
        return b"".join(map(named_event, events))

    def _response(self, status: Any, usage: Usage | None = None, **more: Any) -> schema.Response:
        head, first = self._head, self._request.messages[0].content
        return schema.Response(
            **{**self._terms, **more},
            id=head.id,
            created_at=head.created,
            model=head.model,
            status=status,
            instructions=first if self._request.has_instructions and isinstance(first, str) else None,
            output=[*self._done],
            usage=None if usage is None else _usage(usage),
        )


def _usage(usage: Usage) -> schema.ResponseUsage:
    details, reasoned = usage.prompt_tokens_details, usage.completion_tokens_details
    return schema.ResponseUsage(
        usage.prompt_tokens,
        schema.InputTokensDetails(0 if details is UNSET else details.cached_tokens),
        usage.completion_tokens,
        schema.OutputTokensDetails(0 if reasoned is UNSET else reasoned.reasoning_tokens),
        usage.total_tokens,
    )
