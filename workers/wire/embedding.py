"""Vectors of embeddings, as the bytes that they take in frames, and which rows of a prompt they are made of."""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

Pooling = Literal["last", "mean", "first"]  # of the last layer's states of a prompt
FLOAT: Final = "<f4"
FLOAT_BYTES: Final = 4


def pooled_positions(pooling: Pooling, num_prompt_tokens: int) -> range:
    """The tokens of a prompt whose states are averaged."""
    match pooling:
        case "mean":
            return range(num_prompt_tokens)
        case "last":
            return range(num_prompt_tokens - 1, num_prompt_tokens)
        case "first":
            return range(1)


def packed_vector(vector: npt.NDArray[Any]) -> bytes | None:
    """The numbers in float32, little endian; None: one is not finite."""
    with np.errstate(over="ignore"):
        numbers = vector.astype(FLOAT)
    return numbers.tobytes() if np.isfinite(numbers).all() else None


def unpacked_vector(data: bytes) -> npt.NDArray[np.float32]:
    """What `packed_vector` was given."""
    return np.frombuffer(data, FLOAT)
