"""The id of an answer, which holds what another router must know to resume its stream."""

from __future__ import annotations

import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

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
    """The id in `text`; None: no router of motet made it."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    raw = urlsafe_b64decode(match[2])
    end = _CREATED_BYTES + _FINGERPRINT_BYTES
    return ResponseId(match[1], int.from_bytes(raw[:_CREATED_BYTES]), raw[_CREATED_BYTES:end], raw[end:])


def fingerprint_of(*parts: object) -> bytes:
    """A short hash of everything that decides an answer's tokens and text. `parts`: values that msgspec encodes."""
    return blake2b(_encode(parts), digest_size=_FINGERPRINT_BYTES).digest()
