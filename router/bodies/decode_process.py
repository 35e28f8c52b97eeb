"""The process that decodes large bodies for a router: `python -m motet.router.bodies.decode_process`.

Decoding holds the interpreter's lock until it is done, in a thread too: 2.9 s were seen for 15 MB of JSON. Here it
delays no stream. It answers one question after the other and ends with its standard input. It imports little.
"""

from __future__ import annotations

import gc
import sys
from typing import IO, Final

import msgspec

from ...adapters.processes.child_processes import (
    LAST,
    NOT_LAST,
    read_frames,
    resident_bytes,
    write_frames,
    yield_to_others,
)
from ..http.errors import ApiError, NoSuchResponse, invalid_value
from ..http.json_body import unknown_fields
from .request_decoder import BODY_KINDS, PackedRequest, RequestDecoder, check_extent, check_free, packed

NICENESS: Final = 5  # large bodies yield to all other work
MOST_RESIDENT_BYTES: Final = 256 << 20  # a process that has grown beyond ends, and the router starts another

_DECODERS: Final = {kind.__name__: RequestDecoder(kind) for kind in BODY_KINDS}


class Question(msgspec.Struct, frozen=True):
    """The question, in a frame before that of the body."""

    kind: str  # name of the request's class
    context: int | None  # of the model


class Refusal(msgspec.Struct, frozen=True):
    """What `ApiError` is made of."""

    status_code: int
    message: str
    param: str | None
    code: str | None
    is_as_sent: bool
    response_ids: list[str] | None  # of `NoSuchResponse`


def answer(question: Question, body: bytes, conversations: bytes | None = None) -> list[bytes]:
    """The frames of the answer after its first one: a `PackedRequest`'s and unknown fields, or one with a `Refusal`."""
    try:
        packed_request, unknown = _packed(question, body, conversations)
    except ApiError as error:
        detail = error.detail
        response_ids = error.response_ids if isinstance(error, NoSuchResponse) else None
        refusal = Refusal(error.status_code, detail.message, detail.param, detail.code, error.is_as_sent, response_ids)
        return [msgspec.msgpack.encode(refusal)]
    return [packed_request.head, packed_request.values, msgspec.msgpack.encode(unknown), *packed_request.pieces]


def _packed(question: Question, body: bytes, conversations: bytes | None) -> tuple[PackedRequest, list[str]]:
    decoder = _DECODERS[question.kind]
    request = decoder.decode(body, conversations)
    check_extent(request, question.context)
    try:
        return packed(check_free(request)), unknown_fields(body, decoder.schema)
    except OverflowError:
        message = "The request's body has a whole number of more than 63 bits."
        raise ApiError(400, message, code="invalid_value") from None
    except RecursionError as error:
        raise invalid_value("messages", "they are nested too deeply.") from error


def main(source: IO[bytes], sink: IO[bytes]) -> None:
    gc.disable()  # what is decoded has no cycles, and looking for some takes longer than decoding
    yield_to_others(NICENESS)
    decoder = msgspec.msgpack.Decoder(Question)
    while frames := read_frames(source):
        question, body, *conversations = frames
        response = answer(decoder.decode(question), body, *conversations)
        del frames, body, conversations
        is_last = resident_bytes() > MOST_RESIDENT_BYTES
        write_frames(sink, [LAST if is_last else NOT_LAST, *response])
        del response
        if is_last:
            return


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
