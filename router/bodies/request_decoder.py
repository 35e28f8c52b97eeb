"""Requests' bodies: their limits, how they are decoded, and how they travel between two processes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from ..anthropic.message_chat import (
    CountedChat,
    CountTokensRequest,
    MessageChat,
    MessagesRequest,
    counted_chat,
    message_chat,
)
from ..classification import (
    ClassifyPrompts,
    ClassifyRequest,
    PairPrompts,
    RerankPrompts,
    RerankRequest,
    ScoreRequest,
    classify_prompts,
    rerank_prompts,
    score_prompts,
)
from ..embeddings import EmbeddingPrompts, EmbeddingsRequest, embedding_prompts
from ..grammars.response_format import FORM_FIELDS
from ..http.errors import ApiError, invalid_value, unsupported
from ..http.json_body import decode
from ..openai.request_schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    RefusedInCompletions,
    TokenizeRequest,
    ToolCall,
    UnsupportedFields,
    same_kind,
)
from ..responses.response_chat import response_chat
from ..responses.response_schema import KeptConversation, ResponseChat, ResponsesRequest

# A decoded request on its way between two processes: a small head, and its prompts in pieces.
#
# To take in one long text or list holds the interpreter's lock until it is done, and every stream of the router with
# it. Pieces let others in between.

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
        if isinstance(request, TokenizeRequest | ClassifyPrompts) and request.prompt is not None:
            texts += _values_of(request.prompt)
            request = msgspec.structs.replace(request, prompt=_bare(request.prompt))
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
        remaining = iter(values)
        request = msgspec.structs.replace(
            request, messages=[_with_texts(message, lambda _: str(next(remaining))) for message in request.messages]
        )
        if isinstance(request, TokenizeRequest | ClassifyPrompts) and request.prompt is not None:
            request = msgspec.structs.replace(request, prompt=_as_bare(request.prompt, [*remaining]))
        return request
    if isinstance(request, DetokenizeRequest):
        return msgspec.structs.replace(request, tokens=values[0])
    assert isinstance(request, CompletionRequest)
    return msgspec.structs.replace(request, prompt=_as_bare(request.prompt, values))


def _as_bare(bare: object, values: list[str | list[int]]) -> str | list[int] | list[str | list[int]]:
    """The prompt with these values, of which `_bare` has made `bare`."""
    return values[0] if isinstance(bare, str) or bare == [0] else values


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


# Limits of requests' JSON bodies: their size, their parts, and how slowly they may arrive.

# A token of text is about 4 bytes; 12 where JSON escapes each character, as Python's `json` does. Longer tokens (runs
# of spaces) seldom follow one another.
BYTES_PER_TOKEN: Final = 32
FIXED_BYTES: Final = 256 << 10  # beside the prompts
MOST_BYTES: Final = 16 << 20  # unless the operator says otherwise
MAX_MESSAGES: Final = 8192  # of a chat; also parts of all its messages together, and prompts
MAX_NAME_CHARS: Final = 1024  # of names and ids
MAX_FREE_BYTES: Final = 128 << 10  # of JSON that is passed on unchanged, to the chat template or to llguidance
MAX_ARGUMENTS_CHARS: Final = 256 << 10  # of one tool call: it is parsed at once
MAX_CALLS_CHARS: Final = 512 << 10  # of the arguments of all tool calls of a chat


@dataclass(frozen=True)
class ArrivalPace:
    """The slowest pace at which a body may arrive. A slower one is refused, so that none holds memory for long."""

    grace_s: float  # before the first byte is due
    bytes_per_s: float  # the least rate, on average, after that
    deadline_s: float  # for the whole body

    def latest_s(self, num_bytes: int) -> float:
        """The time by which more than `num_bytes` must have arrived, in seconds since the request began."""
        return min(self.grace_s + num_bytes / self.bytes_per_s, self.deadline_s)


def max_body_bytes(context: int | None, num_prompts: int, configured_bytes: int | None) -> int:
    """The largest body with `num_prompts` prompts: as large as the model's context may need, and not much larger.

    `context`: of the model, in tokens; None: it is not known yet. `configured_bytes`: the operator's own limit, which
    replaces this.

    >>> max_body_bytes(8192, 1, None)
    524288
    >>> max_body_bytes(8192, 1, 1000)
    1000
    """
    if configured_bytes is not None:
        return configured_bytes
    if context is None:
        return MOST_BYTES
    return min(FIXED_BYTES + num_prompts * context * BYTES_PER_TOKEN, MOST_BYTES)


def check_extent(request: BodyRequest, context: int | None) -> None:
    """Raises a 400 for an implausible number of prompts or messages.

    A message takes at least one token of the context, and some time in the template.
    """
    if len(request.model) > MAX_NAME_CHARS:
        raise invalid_value("model", f"it has {len(request.model)} characters: at most {MAX_NAME_CHARS} are accepted.")
    if isinstance(request, CompletionRequest | ClassifyPrompts):
        prompt = request.prompt or ""
        if not isinstance(prompt, str) and len(prompt) > MAX_MESSAGES and not isinstance(prompt[0], int):
            raise invalid_value("prompt", f"there are {len(prompt)} of them: at most {MAX_MESSAGES} are accepted.")
    if not isinstance(request, ChatRequest):
        return
    max_messages = MAX_MESSAGES if context is None else min(MAX_MESSAGES, context)
    if len(request.messages) > max_messages:
        raise invalid_value(
            "messages", f"there are {len(request.messages)} of them: at most {max_messages} are accepted."
        )
    num_parts = sum(len(message.content) for message in request.messages if isinstance(message.content, list))
    if num_parts > max_messages:
        raise invalid_value("messages", f"they have {num_parts} parts: at most {max_messages} together are accepted.")


def check_free(request: BodyRequest) -> BodyRequest:
    """Checks and returns the request of a large body. Raises 400 for values that are too large to pass on."""
    if isinstance(request, DetokenizeRequest):
        return request
    refuse_unsupported(request)
    for field in FORM_FIELDS:
        _check_free(getattr(request, field), field)
    if isinstance(request, ChatRequest):
        for param in ("chat_template_kwargs", "tools", "functions", "documents"):
            _check_free(getattr(request, param), param)
        num_left = MAX_CALLS_CHARS
        for position, message in enumerate(request.messages):
            _check_names(message, position)
            num_left -= _arguments_chars(message, position)
        if num_left < 0:
            problem = f"the arguments of all tool calls have over {MAX_CALLS_CHARS} characters."
            raise invalid_value("messages", problem)
    return request


def _arguments_chars(message: ChatMessage, position: int) -> int:
    """Characters in the arguments of all tool calls of the message."""
    calls = [call.function for call in message.tool_calls or ()]
    sizes = [len(call.arguments or "") for call in [*calls, *filter(None, [message.function_call])]]
    if max(sizes, default=0) > MAX_ARGUMENTS_CHARS:
        problem = f"arguments of at most {MAX_ARGUMENTS_CHARS} characters are accepted."
        raise invalid_value(f"messages[{position}].tool_calls", problem)
    return sum(sizes)


def _check_names(message: ChatMessage, position: int) -> None:
    for field in ("name", "tool_call_id"):
        if len(getattr(message, field) or "") > MAX_NAME_CHARS:
            raise invalid_value(f"messages[{position}].{field}", f"at most {MAX_NAME_CHARS} characters are accepted.")


def _check_free(value: object, param: str) -> None:
    num_bytes = len(msgspec.json.encode(value))
    if num_bytes > MAX_FREE_BYTES:
        raise invalid_value(param, f"it has {num_bytes} bytes of JSON: at most {MAX_FREE_BYTES} are accepted.")


# Any body of this size decodes within a millisecond or two; larger ones are decoded in another process.
MAX_BYTES_ON_LOOP: Final = 64 << 10
MAX_TRANSLATED_BYTES_ON_LOOP: Final = 24 << 10
# Of a body that is translated: millions of tiny items would fit into its bytes.
MAX_OBJECTS: Final = 1 << 20

_decode_stored: Final = msgspec.json.Decoder(dict[str, KeptConversation]).decode

BODY_KINDS: Final[tuple[type[BodyRequest], ...]] = (
    CompletionRequest,
    ChatRequest,
    ResponseChat,
    MessageChat,
    CountedChat,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingPrompts,
    ClassifyPrompts,
    PairPrompts,
    RerankPrompts,
)
# For kinds whose bodies have another schema: that schema, and the function that makes the chat.
_TRANSLATED: Final[Mapping[type[Any], tuple[type[Any], Callable[..., Any]]]] = MappingProxyType(
    {
        ResponseChat: (ResponsesRequest, response_chat),
        MessageChat: (MessagesRequest, message_chat),
        CountedChat: (CountTokensRequest, counted_chat),
        EmbeddingPrompts: (EmbeddingsRequest, embedding_prompts),
        ClassifyPrompts: (ClassifyRequest, classify_prompts),
        PairPrompts: (ScoreRequest, score_prompts),
        RerankPrompts: (RerankRequest, rerank_prompts),
    }
)


class RequestDecoder(Generic[R]):
    """Decodes the bodies of one kind of requests."""

    def __init__(self, kind: type[R]) -> None:
        self.schema: type[Any] = kind  # of the bodies
        self._translate: Callable[..., Any] | None = None
        if kind in _TRANSLATED:
            self.schema, self._translate = _TRANSLATED[kind]
        self.max_bytes_on_loop = MAX_BYTES_ON_LOOP if self._translate is None else MAX_TRANSLATED_BYTES_ON_LOOP
        self._json = msgspec.json.Decoder[Any](self.schema)

    def decode(self, body: bytes | bytearray, conversations: bytes | None = None) -> R:
        """Raises a 400 for a body that does not fit the schema.

        `conversations`: JSON of the stored responses that it may refer to, for `ResponseChat` alone; see
        `response_chat`.
        """
        if self._translate is not None and body.count(b"{") > MAX_OBJECTS:
            raise ApiError(413, f"The request's body has more than {MAX_OBJECTS} objects.", code="request_too_large")
        try:
            request: R = decode(body, self._json)
            if self._translate is not None:
                stored = () if conversations is None else (_decode_stored(conversations),)
                request = self._translate(request, *stored)
        except ApiError as error:
            error.is_as_sent = True
            raise
        except RecursionError as error:
            raise ApiError(400, "The request's body is nested too deeply.", code="invalid_json") from error
        return request


# Which fields of a request are refused, because an answer that ignores them would not be the one requested.

# Values of these fields that are accepted, because they ask for what motet does anyway.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "documents": ([],),
        "suffix": ("",),
        "logits_processors": ([],),
        "early_stopping": (False, "never"),  # of beam search, which goes on until nothing better can come
        "spaces_between_special_tokens": (True,),
        "no_stop_trim": (False,),
        "separate_reasoning": (True,),
        "return_hidden_states": (False,),
        "detokenize": (True,),
        "vllm_xargs": ({},),
        "verbosity": ("medium",),
    }
)


@cache
def refused_fields(kind: type[GenerationFields]) -> tuple[str, ...]:
    """The fields of these requests of which only neutral values are accepted."""
    refused = set(UnsupportedFields.__struct_fields__)
    if issubclass(kind, RefusedInCompletions):
        refused |= RefusedInCompletions.__annotations__.keys()
    return tuple(field for field in kind.__struct_fields__ if field in refused)


def refuse_unsupported(request: GenerationFields) -> None:
    """Raises a 400 that names the first field with a value that is not supported."""
    for field in refused_fields(type(request)):
        value = getattr(request, field)
        # The type counts, because False == 0 in Python.
        if value is not None and not any(
            type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(field, ())
        ):
            raise unsupported(field, _advice(field))
    if isinstance(request, ChatRequest) and request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "a chat has none but one equal to n; leave it out.")


def _advice(field: str) -> str:
    accepted = NEUTRAL.get(field)
    if accepted is None:
        return "it is not supported here; leave it out."
    return f"of its values only {' or '.join(repr(value) for value in accepted)} is supported here, or leave it out."
