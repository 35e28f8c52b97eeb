"""The items of a response under way: the events of each item's start, additions and end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from ..openai_api import response_schema as schema
from ..openai_api.answer_schema import ChatTokenLogprob
from ..openai_api.response_schema import ItemStatus, OutputItem, StreamEvent
from ..requests.custom_tools import input_of

_encode: Final = msgspec.json.Encoder().encode


@dataclass
class Place:
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
    place: Place

    def item(self, status: ItemStatus) -> OutputItem:
        """The item so far; it is empty while it is in progress."""

    def opening(self) -> Iterator[StreamEvent]:
        """The events after `ItemAdded` and before those of the additions."""

    def closing(self) -> Iterator[StreamEvent]:
        """The events after those of the additions and before `ItemDone`."""


@dataclass
class GrowingMessage:
    place: Place
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
    place: Place
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
    place: Place
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
