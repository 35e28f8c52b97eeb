"""Embeddings on their way out: one JSON document, whose numbers are written vector by vector."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from typing import Final, NoReturn

import msgspec
import numpy as np
from starlette.responses import Response

from ...workers.wire.prompt_scores import FLOAT, FLOAT_BYTES, unpacked_vector
from ..generation.choice import Delta
from ..generation.usage import Usage
from ..http.errors import ApiError
from .embedding_schema import Embedding, EmbeddingList, EmbeddingUsage, EncodingFormat

_NO_DATA: Final = b'"data":[]'
_encode: Final = msgspec.json.Encoder().encode


class EmbeddingForm:
    """An `AnswerForm`, which is never streamed."""

    is_stream = False

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
        embedding_usage = EmbeddingUsage(usage.prompt_tokens, usage.prompt_tokens)
        before, after = _encode(EmbeddingList([], self._model, embedding_usage)).split(_NO_DATA, 1)
        yield before + b'"data":['
        for index, vector in enumerate(self._vectors):
            if vector is None:
                raise RuntimeError("a gang has sent no embedding: is it one of an older motet?")
            yield (b"," if index else b"") + _encode(Embedding(index, self._components(vector)))
        yield b"]" + after

    def opening(self, usage: Usage, *, is_over: bool) -> Iterable[bytes]:
        _never()

    def delta(self, index: int, delta: Delta) -> bytes:
        _never()

    def ending(self, usage: Usage) -> bytes:
        _never()

    def failure(self, error: ApiError) -> bytes:
        _never()

    def refusal(self, error: ApiError) -> Response:
        return error.response()

    def _components(self, vector: bytes) -> list[float] | str:
        numbers = unpacked_vector(vector).astype(np.float64)
        if self._is_normalised and (length := np.linalg.norm(numbers)):
            numbers /= length
        components = numbers.astype(FLOAT)
        return b64encode(components.tobytes()).decode() if self._style == "base64" else components.tolist()


def _never() -> NoReturn:
    raise AssertionError("embeddings are never streamed")
