"""Positions in a stream of events: the ids of its events, and what a client that resumes the stream sends back.

An id is `<response id>:<tokens of choice 0>.<tokens of choice 1>…`: the numbers of tokens that a client has had after
this event. Events without a token have a suffix that makes their ids unique: `/2` is the second of several events
before the first token (the last of them has no suffix), `/end` the event with the usage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .errors import ApiError, invalid_value
from .response_id import ResponseId, parse_response_id

LAST_EVENT_ID: Final = "Last-Event-ID"
AT_USAGE: Final = "end"
_MAX_CHARS: Final = 2048  # longer than the id for 128 choices of millions of tokens
_POSITION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})*)(?:/([0-9]{1,3}|end))?", re.ASCII)


@dataclass(frozen=True)
class StreamPosition:
    """The part of a stream that a client has had."""

    response_id: ResponseId
    num_tokens: tuple[int, ...]  # of each choice
    num_openings: int | None = None  # events before the first token; None: all of them
    has_usage: bool = False


def event_id(response_id: str, num_tokens: Sequence[int], suffix: str | int = "") -> bytes:
    """The line of an event that tells the position after it."""
    tail = f"/{suffix}" if suffix != "" else ""
    return f"id: {response_id}:{_dotted(num_tokens)}{tail}\n".encode()


def parse_position(text: str) -> StreamPosition:
    """The position in a `Last-Event-ID`. Raises a 400 for text that is no id of an event of motet."""
    id_text, _, rest = text.partition(":")
    response_id = parse_response_id(id_text)
    match = _POSITION.fullmatch(rest) if len(text) <= _MAX_CHARS else None
    if response_id is None or match is None:
        shown = text if len(text) <= 80 else f"{text[:80]}…"
        raise wrong_position(f"{shown!r} is not the id of an event of these streams.")
    counts = tuple(map(int, match[1].split(".")))
    suffix = match[2]
    if suffix is None or suffix == AT_USAGE:
        return StreamPosition(response_id, counts, has_usage=suffix is not None)
    if any(counts):
        raise wrong_position(f"it ends with /{suffix}, as before the first token only, and tells of tokens.")
    return StreamPosition(response_id, counts, int(suffix))


def wrong_position(message: str) -> ApiError:
    return invalid_value(LAST_EVENT_ID, message)


def _dotted(num_tokens: Sequence[int]) -> str:
    return ".".join(map(str, num_tokens))
