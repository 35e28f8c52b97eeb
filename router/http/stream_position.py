"""Positions in a stream of events: the ids of its events, and what a client that resumes the stream sends back.

An id is `<response id>:<tokens of choice 0>.<tokens of choice 1>…:<seal>`: the numbers of tokens that a client has had
after this event, and the proof that this is so. Events without a token have a suffix behind the
numbers that makes their ids unique: `/2` is the second of several events before the first token (the last of them has
no suffix), `/end` the event with the usage.
"""

from __future__ import annotations

import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from .errors import ApiError, invalid_value

# What proves that an event id was sent by a router of this motet: a MAC, with a key that all of its routers share.
#
# An id says how many tokens of each choice its client has had. A sequence that has delivered tokens is served on
# however many others wait, so the numbers must not be a client's to choose. A seal holds for one tenant.

_SEAL_BYTES: Final = 12
NUM_SEAL_CHARS: Final = 2 * _SEAL_BYTES  # hex
_PURPOSE: Final = b"motet event id"


class EventIds:
    """The ids of one answer's events, sealed: all of an id but its end is hashed once."""

    def __init__(self, response_id: str, tenant: str, key: bytes) -> None:
        """`key`: the newest that routers share."""
        self._head = f"id: {response_id}:"
        self._hasher = blake2b(key=key, digest_size=_SEAL_BYTES, person=_PURPOSE)
        self._hasher.update(f"{len(tenant)}:{tenant}{response_id}:".encode())

    def seal(self, position: str) -> str:
        """`NUM_SEAL_CHARS` characters. `position`: the part of the id that is the position."""
        ended = self._hasher.copy()
        ended.update(position.encode())
        return ended.hexdigest()

    def line(self, num_tokens: Sequence[int], suffix: str | int = "") -> bytes:
        """The line of an event with the position after it."""
        position = str(num_tokens[0]) if len(num_tokens) == 1 else ".".join(map(str, num_tokens))
        if suffix != "":
            position += f"/{suffix}"
        return f"{self._head}{position}:{self.seal(position)}\n".encode()


def is_sealed(seal: str, keys: Sequence[bytes], tenant: str, response_id: str, position: str) -> bool:
    """Whether a router with any of these keys made the seal.

    >>> seal = EventIds("cmpl-1", "acme", b"key").seal("5")
    >>> is_sealed(seal, [b"another", b"key"], "acme", "cmpl-1", "5"), is_sealed(seal, [b"key"], "zoo", "cmpl-1", "5")
    (True, False)
    """
    seals = [EventIds(response_id, tenant, key).seal(position) for key in keys]
    return any(hmac.compare_digest(valid_seal, seal) for valid_seal in seals)


# The id of an answer, which holds what another router must know to resume its stream.

_CREATED_BYTES: Final = 4
_FINGERPRINT_BYTES: Final = 7
_NONCE_BYTES: Final = 16  # random, so that the id of another client's answer cannot be guessed
_NUM_CHARS: Final = (_CREATED_BYTES + _FINGERPRINT_BYTES + _NONCE_BYTES) * 4 // 3
_FORM: Final = re.compile(rf"([a-z]+[-_])([A-Za-z0-9_-]{{{_NUM_CHARS}}})")
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class ResponseId:
    """Parses an id such as `cmpl-…` or `resp_…`."""

    prefix: str
    created: int  # when the answer began: Unix time in seconds, up to the year 2106
    fingerprint: bytes  # of the request
    nonce: bytes  # makes the id unique

    def __str__(self) -> str:
        raw = self.created.to_bytes(_CREATED_BYTES) + self.fingerprint + self.nonce
        return self.prefix + urlsafe_b64encode(raw).decode()


def new_response_id(prefix: str, created: int, fingerprint: bytes) -> ResponseId:
    return ResponseId(prefix, created, fingerprint, secrets.token_bytes(_NONCE_BYTES))


def parse_response_id(text: str) -> ResponseId | None:
    """The id in `text`; None: no router of motet made it.

    >>> response_id = new_response_id("chatcmpl-", 1_700_000_000, fingerprint_of("prompt", 7))
    >>> parse_response_id(str(response_id)) == response_id
    True
    >>> parse_response_id("chatcmpl-of-another-server") is None
    True
    """
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    raw = urlsafe_b64decode(match[2])
    end = _CREATED_BYTES + _FINGERPRINT_BYTES
    return ResponseId(match[1], int.from_bytes(raw[:_CREATED_BYTES]), raw[_CREATED_BYTES:end], raw[end:])


def fingerprint_of(*parts: object) -> bytes:
    """A short hash of everything that decides an answer's tokens and text. `parts`: values that msgspec encodes."""
    return blake2b(_encode(parts), digest_size=_FINGERPRINT_BYTES).digest()


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


def parse_position(text: str, tenant: str, keys: Sequence[bytes]) -> StreamPosition:
    """The position in a `Last-Event-ID`. Raises a 400 for text that is not an event id of this motet and tenant.

    `keys`: with which its routers have sealed ids.
    """
    id_text, _, tail = text.partition(":")
    response_id = parse_response_id(id_text)
    match = _POSITION.fullmatch(tail) if len(text) <= _MAX_CHARS else None
    if response_id is None or match is None:
        excerpt = text if len(text) <= 80 else f"{text[:80]}…"
        raise wrong_position(f"{excerpt!r} is not the id of an event of these streams.")
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
