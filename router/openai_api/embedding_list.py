"""Answers of OpenAI's embeddings API as data. Requests are in `embedding_request.py`."""

from __future__ import annotations

from typing import Literal

import msgspec


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
