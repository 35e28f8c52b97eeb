"""A request of embeddings as the prompts that are computed for it, and how they are pooled."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ...workers.wire.messages import GangInfo
from ...workers.wire.prompt_scores import Pooling
from ..http.errors import invalid_value, unsupported
from ..openai.chat_prompt import count_prompts
from ..text.model_tokenizer import OwnPooling
from .embedding_schema import EmbeddingPrompts, EmbeddingsRequest, EncodingFormat

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
_REFUSED: Final = {
    "messages": "send the text as input, with the template's marks where the model wants them.",
    "normalize": "the model's own pooling says so; with pooling the length is 1: leave it out.",
    "use_activation": "the model's own pooling says so; with pooling the length is 1: leave it out.",
    "input_type": "send the instruction that the model wants as a part of the input.",
}


def embedding_prompts(request: EmbeddingsRequest) -> EmbeddingPrompts:
    """Raises a 400 that names a field of the request."""
    for field, why in _REFUSED.items():
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
