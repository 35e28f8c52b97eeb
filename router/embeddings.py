"""OpenAI's embeddings: requests and answers as data, prompts of a request, and the answer."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from ..workers.wire.messages import GangInfo
from ..workers.wire.prompt_scores import FLOAT, FLOAT_BYTES, Pooling, unpacked_vector
from .generation.choice import Delta
from .generation.usage import Usage
from .http.errors import invalid_value, unsupported
from .openai.answer_form import UnstreamedForm
from .openai.chat_prompt import count_prompts
from .openai.request_schema import MAX_TIMEOUT_S, CompletionRequest, Count
from .text.model_tokenizer import OwnPooling

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


class PromptUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: PromptUsage
    object: Literal["list"] = "list"


# A request of embeddings as the prompts that are computed for it, and how they are pooled.

MAX_INPUTS: Final = 2048  # as at OpenAI
# Numbers of all vectors of an answer, by how they are written: some 20 bytes each, or 6.
MAX_NUMBERS: Final[Mapping[EncodingFormat, int]] = MappingProxyType({"float": 1 << 21, "base64": 1 << 22})
NAMES: Final = {"prompt": "input"}  # of a completion's fields: see `renamed`
_SHARED: Final = (
    "model",
    "user",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "timeout",
    "priority",
    "service_tier",
    "cache_salt",
)
_REFUSED_FIELDS: Final = {
    "messages": "send the text as input, with the template's marks where the model wants them.",
    "normalize": "the model's own pooling says so; with pooling the length is 1: leave it out.",
    "use_activation": "the model's own pooling says so; with pooling the length is 1: leave it out.",
    "input_type": "send the instruction that the model wants as a part of the input.",
}


def embedding_prompts(request: EmbeddingsRequest) -> EmbeddingPrompts:
    """Raises a 400 that names a field of the request."""
    for field, why in _REFUSED_FIELDS.items():
        if getattr(request, field) is not None:
            raise unsupported(field, why)
    return EmbeddingPrompts(
        prompt=request.input,
        max_tokens=0,
        encoding_format=request.encoding_format or "float",
        dimensions=request.dimensions,
        pooling=request.pooling,
        **{field: getattr(request, field) for field in _SHARED},
    )


def chosen_pooling(request: EmbeddingPrompts, model_pooling: OwnPooling, gang: GangInfo) -> Pooling:
    """The request's own pooling, or the model's. Raises a 400 for what the model's cannot do."""
    if request.dimensions is not None and request.dimensions > gang.hidden_size:
        problem = f"{request.dimensions} are requested, and embeddings of this model have {gang.hidden_size}."
        raise invalid_value("dimensions", problem)
    num_inputs, num_each = count_prompts(request), request.dimensions or gang.hidden_size
    if num_inputs * num_each > (limit := MAX_NUMBERS[request.encoding_format]):
        raise invalid_value(
            "input",
            f"{num_inputs} inputs times {num_each} numbers are {num_inputs * num_each}: in one answer at most "
            f"{MAX_NUMBERS['float']} are accepted, and {MAX_NUMBERS['base64']} with encoding_format base64. Send at "
            f"most {limit // num_each} inputs.",
        )
    if request.pooling is not None:
        return request.pooling
    if model_pooling.pooling is None:
        raise unsupported("pooling", f"{model_pooling.problem}: ask for pooling last or mean.")
    return model_pooling.pooling


_NO_DATA: Final = b'"data":[]'
_encode: Final = msgspec.json.Encoder().encode


class EmbeddingForm(UnstreamedForm):
    """An `AnswerForm`."""

    def __init__(
        self, model: str, num_inputs: int, style: EncodingFormat, dimensions: int | None, *, is_normalised: bool
    ) -> None:
        """`dimensions`: numbers that are left of each; None: all. `is_normalised`: what is left has the length 1."""
        self._model, self._style, self._dimensions, self._is_normalised = model, style, dimensions, is_normalised
        self._vectors: list[bytes | None] = [None] * num_inputs

    def take(self, index: int, delta: Delta) -> None:
        num_bytes = None if self._dimensions is None else self._dimensions * FLOAT_BYTES
        self._vectors[index] = None if delta.embedding is None else delta.embedding[:num_bytes]

    def document(self, usage: Usage) -> Iterator[bytes]:
        prompt_usage = PromptUsage(usage.prompt_tokens, usage.prompt_tokens)
        before, after = _encode(EmbeddingList([], self._model, prompt_usage)).split(_NO_DATA, 1)
        yield before + b'"data":['
        for index, vector in enumerate(self._vectors):
            if vector is None:
                raise RuntimeError("a gang has sent no embedding: is it one of an older motet?")
            yield (b"," if index else b"") + _encode(Embedding(index, self._components(vector)))
        yield b"]" + after

    def _components(self, vector: bytes) -> list[float] | str:
        numbers = unpacked_vector(vector).astype(np.float64)
        if self._is_normalised and (length := np.linalg.norm(numbers)):
            numbers /= length
        components = numbers.astype(FLOAT)
        return b64encode(components.tobytes()).decode() if self._style == "base64" else components.tolist()
