"""Answers of OpenAI's API as data. Requests are in `request_schema.py`.

A field that is UNSET is left out of the JSON. The fields `token_ids`, `prompt_token_ids` and `prompt_logprobs` are
vLLM's.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...workers.wire.messages import FinishReason
from ..generation.usage import Usage

ChunkUsage = Usage | None | UnsetType  # None in all chunks but the last, if usage was requested; UNSET if it was not
# The stop string, or the token of `stop_token_ids`, that has ended the choice; None: neither has. UNSET: it goes on.
StopReason = str | int | None | UnsetType


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """With `echo` the prompt's tokens come first, and null stands for what its first token does not have."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int  # 1: the likeliest
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # of each token of the prompt; null for the first


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | msgspec.Raw | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | msgspec.Raw | UnsetType = UNSET
    stop_reason: StopReason = UNSET


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, or a chunk of a stream, which has the same form."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChunkUsage = UNSET
    system_fingerprint: str | UnsetType = UNSET  # which version of an adapter answered, as `name@3`
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


ChatFinishReason = FinishReason | Literal["tool_calls", "function_call"]


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON of an object


class CalledTool(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class CalledFunctionDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class CalledToolDelta(msgspec.Struct, frozen=True):
    """A call, or a piece of one: only the first has an id and a name."""

    index: int
    id: str | UnsetType
    function: CalledFunctionDelta
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same, as others call it
    tool_calls: list[CalledToolDelta] | UnsetType = UNSET
    function_call: CalledFunctionDelta | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: StopReason = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str | None  # None where there are only calls
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | msgspec.Raw | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    stop_reason: StopReason = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | msgspec.Raw | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    owned_by: str
    root: str  # the base's name
    parent: str | None  # the base's name; null for the base itself
    max_model_len: int | None  # null until a gang has connected
    object: Literal["model"] = "model"
