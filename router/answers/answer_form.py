"""The interface of all formats of answers: one JSON document, or a stream of events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from starlette.responses import Response

from ..generation.choice import Delta
from ..openai_api.answer_schema import Usage
from ..openai_api.errors import ApiError


class AnswerForm(Protocol):
    """Formats one answer, and may keep state between calls."""

    is_stream: bool

    def take(self, index: int, delta: Delta) -> None:
        """Adds a delta of the choice `index` to the document."""

    def document(self, usage: Usage) -> Iterator[bytes]:
        """The whole answer as JSON, in pieces that each take little time."""

    def opening(self, usage: Usage, *, is_over: bool) -> Iterable[bytes]:
        """The events before the first delta that the client has not received.

        `is_over`: there is no such delta. Raises a 400 if that contradicts the client's position.
        """

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events for a delta of the choice `index`; empty: none."""

    def ending(self, usage: Usage) -> bytes:
        """The events after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """The last events of a stream that has begun and cannot go on."""

    def refusal(self, error: ApiError) -> Response:
        """The error in place of an answer."""
