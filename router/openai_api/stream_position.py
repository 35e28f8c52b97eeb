"""Positions in a stream of events: the ids of its events, and what a client that resumes the stream sends back.

An id is `<response id>:<tokens of choice 0>.<tokens of choice 1>…:<seal>`: the numbers of tokens that a client has had
after this event, and the proof that this is so (`event_seal.py`). Events without a token have a suffix behind the
numbers that makes their ids unique: `/2` is the second of several events before the first token (the last of them has
no suffix), `/end` the event with the usage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .errors import ApiError, invalid_value
from .event_seal import NUM_SEAL_CHARS, EventSealer, is_sealed
from .response_id import ResponseId, parse_response_id

LAST_EVENT_ID: Final = "Last-Event-ID"
AT_USAGE: Final = "end"
_MAX_CHARS: Final = 2048  # longer than the id for 128 choices of millions of tokens
_POSITION: Final = re.compile(
    rf"(([0-9]{{1,9}}(?:\.[0-9]{{1,9}})*)(?:/([0-9]{{1,3}}|end))?):([0-9a-f]{{{NUM_SEAL_CHARS}}})", re.ASCII
)


@dataclass(frozen=True)
class StreamPosition:
    """The part of a stream that a client has had."""

    response_id: ResponseId
    num_tokens: tuple[int, ...]  # of each choice
    num_openings: int | None = None  # events before the first token; None: all of them
    has_usage: bool = False


class EventIds:
    """The ids of one answer's events."""

    def __init__(self, response_id: str, tenant: str, key: bytes) -> None:
        """`key`: the newest that routers share."""
        self._head = f"id: {response_id}:"
        self._sealer = EventSealer(key, tenant, response_id)

    def line(self, num_tokens: Sequence[int], suffix: str | int = "") -> bytes:
        """The line of an event with the position after it."""
        position = _dotted(num_tokens)
        if suffix != "":
            position += f"/{suffix}"
        return f"{self._head}{position}:{self._sealer.seal(position)}\n".encode()


def parse_position(text: str, tenant: str, keys: Sequence[bytes]) -> StreamPosition:
    """The position in a `Last-Event-ID`. Raises a 400 for text that is not an event id of this motet and tenant.

    `keys`: with which its routers have sealed ids.
    """
    id_text, _, rest = text.partition(":")
    response_id = parse_response_id(id_text)
    match = _POSITION.fullmatch(rest) if len(text) <= _MAX_CHARS else None
    if response_id is None or match is None:
        shown = text if len(text) <= 80 else f"{text[:80]}…"
        raise wrong_position(f"{shown!r} is not the id of an event of these streams.")
    position, dotted, suffix, seal = match.groups()
    if not is_sealed(seal, keys, tenant, id_text, position):
        raise wrong_position(
            "it was not sent to this tenant by this motet, or not in this form. Send the request again without it."
        )
    counts = tuple(map(int, dotted.split(".")))
    if suffix is None or suffix == AT_USAGE:
        return StreamPosition(response_id, counts, has_usage=suffix is not None)
    if any(counts):
        raise wrong_position(
            f"it ends with /{suffix}, which is for positions before the first token, and it counts tokens."
        )
    return StreamPosition(response_id, counts, int(suffix))


def wrong_position(message: str) -> ApiError:
    return invalid_value(LAST_EVENT_ID, message)


def _dotted(num_tokens: Sequence[int]) -> str:
    return str(num_tokens[0]) if len(num_tokens) == 1 else ".".join(map(str, num_tokens))
