"""A decoded request on its way between two processes: a small head, and its prompts in pieces.

To take in one long text or list holds the interpreter's lock until it is done, and every stream of the router with it.
Pieces let others in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from ..openai_api.request_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
    ToolCall,
    same_kind,
)

PIECE_CHARS: Final = 128 << 10
PIECE_IDS: Final = 64 << 10
_ID: Final = "q"
_MOST_ID: Final = 2**63 - 1

BodyRequest = GenerationFields | DetokenizeRequest
R = TypeVar("R", bound=BodyRequest)
Kind = Literal["text", "ids"]


class PackedRequest(NamedTuple):
    head: bytes  # msgpack of the request without its prompts
    values: bytes  # msgpack of a list of (kind, number of pieces), one for each value
    pieces: list[bytes]


def packed(request: BodyRequest) -> PackedRequest:
    """Raises a 400 for a prompt that mixes texts and token ids."""
    if isinstance(request, ChatRequest):
        texts: list[str | list[int]] = []
        bare = [_with_texts(message, lambda text: _extract(text, texts)) for message in request.messages]
        request = msgspec.structs.replace(request, messages=bare)
        if isinstance(request, TokenizeRequest) and request.prompt is not None:
            texts.append(request.prompt)
            request = msgspec.structs.replace(request, prompt="")
    elif isinstance(request, DetokenizeRequest):
        texts = [request.tokens]
        request = msgspec.structs.replace(request, tokens=[])
    else:
        assert isinstance(request, CompletionRequest)
        texts = _values_of(request.prompt)
        request = msgspec.structs.replace(request, prompt=_bare(request.prompt))
    pieces: list[bytes] = []
    shapes: list[tuple[Kind, int]] = []
    for value in texts:
        parts = _text_pieces(value) if isinstance(value, str) else _id_pieces(value)
        shapes.append(("text" if isinstance(value, str) else "ids", len(parts)))
        pieces += parts
    return PackedRequest(msgspec.msgpack.encode(request), msgspec.msgpack.encode(shapes), pieces)


def unpacked(packed_request: PackedRequest, kind: type[R]) -> R:
    """The request that was packed. To be called in a thread."""
    request = msgspec.msgpack.decode(packed_request.head, type=kind)
    pieces = iter(packed_request.pieces)
    shapes = msgspec.msgpack.decode(packed_request.values, type=list[tuple[Kind, int]])
    values = [_joined(shape, [next(pieces) for _ in range(num_pieces)]) for shape, num_pieces in shapes]
    if isinstance(request, ChatRequest):
        texts = (value for value in values if isinstance(value, str))
        request = msgspec.structs.replace(
            request, messages=[_with_texts(message, lambda _: next(texts)) for message in request.messages]
        )
        if isinstance(request, TokenizeRequest) and request.prompt is not None:
            request = msgspec.structs.replace(request, prompt=next(texts))
        return request
    if isinstance(request, DetokenizeRequest):
        return msgspec.structs.replace(request, tokens=values[0])
    assert isinstance(request, CompletionRequest)
    is_one = isinstance(request.prompt, str) or request.prompt == [0]
    return msgspec.structs.replace(request, prompt=values[0] if is_one else values)


def _bare(prompt: str | Sequence[str | int | list[int]]) -> str | list[int]:
    """A value of the prompt's kind for `unpacked`: one text, one list of ids ([0]), or a list of prompts ([])."""
    if isinstance(prompt, str):
        return ""
    return [0] if prompt and isinstance(prompt[0], int) else []


def _values_of(prompt: str | Sequence[str | int | list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        return []
    if isinstance(prompt[0], int):
        return [[same_kind(token_id, int, position) for position, token_id in enumerate(prompt)]]
    kind = type(prompt[0])
    return [same_kind(value, kind, position) for position, value in enumerate(prompt)]


_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal")


def _extract(text: str, texts: list[str | list[int]]) -> str:
    texts.append(text)
    return ""


def _with_texts(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    """The message with each of its long texts changed, in a fixed order."""
    replace = msgspec.structs.replace
    changed: dict[str, Any] = {}
    for field in _TEXTS:
        if isinstance(text := getattr(message, field), str):
            changed[field] = change(text)
    if isinstance(message.content, list):
        changed["content"] = [
            part if part.text is None else replace(part, text=change(part.text)) for part in message.content
        ]
    if message.tool_calls:
        changed["tool_calls"] = [_with_arguments(call, change) for call in message.tool_calls]
    return replace(message, **changed) if changed else message


def _with_arguments(call: ToolCall, change: Callable[[str], str]) -> ToolCall:
    if call.function.arguments is None:
        return call
    function = msgspec.structs.replace(call.function, arguments=change(call.function.arguments))
    return msgspec.structs.replace(call, function=function)


def _text_pieces(text: str) -> list[bytes]:
    starts = range(0, len(text), PIECE_CHARS)
    return [text[start : start + PIECE_CHARS].encode("utf-8", "surrogatepass") for start in starts]


def _id_pieces(token_ids: list[int]) -> list[bytes]:
    try:
        array(_ID, token_ids)
    except OverflowError:  # the check of token ids will refuse them
        token_ids = [max(min(token_id, _MOST_ID), -_MOST_ID) for token_id in token_ids]
    starts = range(0, len(token_ids), PIECE_IDS)
    return [array(_ID, token_ids[start : start + PIECE_IDS]).tobytes() for start in starts]


def _joined(kind: Kind, pieces: list[bytes]) -> str | list[int]:
    if kind == "text":
        return "".join(piece.decode("utf-8", "surrogatepass") for piece in pieces)
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += array(_ID, piece).tolist()
    return token_ids
