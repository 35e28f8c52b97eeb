"""Requests and answers of OpenAI's embeddings API as data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..openai.request_schema import MAX_TIMEOUT_S, CompletionRequest, Count

# Requests of OpenAI's embeddings API as data.

EncodingFormat = Literal["float", "base64"]
PoolingName = Literal["last", "mean"]
_REFUSED = Meta(description="Refused but null.")


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are not OpenAI's mean the same as at /v1/completions; `pooling` is motet's."""

    model: Annotated[str, Meta(description="The base's name, or one of your adapters'.")]
    input: Annotated[
        str | list[str | int | list[int]], Meta(description="A text, several, token ids, or several lists of them.")
    ]
    encoding_format: Annotated[
        EncodingFormat | None, Meta(description="`base64`: of numbers in float32, little endian.")
    ] = None
    dimensions: Annotated[Count | None, Meta(description="How many of the first numbers to return.")] = None
    pooling: Annotated[
        PoolingName | None, Meta(description="Of the last layer's states, in place of the model's own.")
    ] = None
    user: Annotated[str, Meta(max_length=512, description="For whom you ask, in your own words.")] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Begin and end as the model's tokenizer does.")] = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, description="So many of an input's last tokens are read; -1: what has room.")] | None
    ) = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S, description="Seconds for the whole answer.")] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100, description="Among your own, the higher goes first.")] | None = None
    service_tier: Annotated[str, Meta(max_length=64, description="`flex` yields to everybody.")] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024, description="KV is shared only with equal salts.")] | None = None
    messages: Annotated[Any, _REFUSED] = None  # vLLM's, as are the next three
    embed_dtype: Annotated[Literal["float32"] | None, Meta(description="What embeddings are in anyway.")] = None
    normalize: Annotated[Any, _REFUSED] = None
    use_activation: Annotated[Any, _REFUSED] = None
    input_type: Annotated[Any, _REFUSED] = None


class EmbeddingPrompts(CompletionRequest, frozen=True, kw_only=True):
    """The completion of no tokens whose prompts an `EmbeddingsRequest` wants embedded."""

    encoding_format: EncodingFormat
    dimensions: int | None
    pooling: PoolingName | None


# Answers of OpenAI's embeddings API as data.


class Embedding(msgspec.Struct, frozen=True):
    index: int  # of the input
    embedding: list[float] | str  # base64 of the same numbers in float32, little endian
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
