"""Requests of OpenAI's API as data, with vLLM's usual extensions. Answers are in `answer_schema.py`.

A field that is null counts as absent, as in OpenAI's API. Fields that are not listed here are ignored; those of
`UnsupportedFields` are listed so that they can be refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

StopString = Annotated[str, Meta(min_length=1, max_length=1024)]  # text that may become one is held back
TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
MAX_LOGIT_BIASES = 1024  # each bias costs time at every token
MAX_TIMEOUT_S = 86_400
Role = Literal["system", "developer", "user", "assistant", "tool"]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: running usage in every chunk


class UnsupportedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that would change the answer and that motet does not support. See `unsupported_fields.py`."""

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    logits_processors: Any = None
    early_stopping: Any = None
    min_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    return_tokens_as_token_ids: Any = None


class GenerationFields(UnsupportedFields, frozen=True, kw_only=True):
    """The fields that completion requests and chat requests share."""

    model: str
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.001, le=100)] | None = None  # logits are divided by it
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None  # vLLM: n is the number of beams
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None  # seconds for the whole answer
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None  # among the tenant's own, the higher one goes first
    service_tier: Annotated[str, Meta(max_length=64)] | None = None  # "flex": it yields to everybody; others: nothing
    user: Annotated[str, Meta(max_length=512)] | None = None  # for whom the client asks, in its own words
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None  # vLLM: sequences share KV only with equal salts


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
