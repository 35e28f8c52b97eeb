"""Log-probabilities of a prompt's tokens, as the bytes that they take in plans, frames and a router's memory."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

_FLOAT: Final = "<f4"
_INT: Final = "<i4"
_FIXED_BYTES: Final = 8  # of a row: its token's log-probability and rank
_TOP_BYTES: Final = 8  # of each likely token


class PromptScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Scores of consecutive tokens, a row for each: its probability given all tokens before it.

    The first token of a prompt has none. A row has the token's natural log-probability, its rank among all tokens (1:
    the likeliest) and the `num_top` likeliest tokens.
    """

    num_top: int
    data: bytes

    @property
    def num_rows(self) -> int:
        return len(self.data) // row_bytes(self.num_top)

    @property
    def num_values(self) -> int:
        """Numbers in it, of 4 bytes each."""
        return len(self.data) // 4

    def part(self, start: int, end: int) -> PromptScores:
        """The rows from `start` on, to before `end`."""
        size = row_bytes(self.num_top)
        return PromptScores(self.num_top, self.data[start * size : end * size])

    def rows(self) -> npt.NDArray[Any]:
        """A structured array with the fields logprob, rank, top_ids and top_logprobs, the likeliest first."""
        return np.frombuffer(self.data, _row_type(self.num_top))


def row_bytes(num_top: int) -> int:
    return _FIXED_BYTES + _TOP_BYTES * num_top


def packed_scores(
    logprobs: npt.NDArray[Any],
    ranks: npt.NDArray[Any],
    top_ids: npt.NDArray[Any],
    top_logprobs: npt.NDArray[Any],
) -> PromptScores:
    """Of `[num_rows]` and `[num_rows, num_top]` numbers."""
    rows = np.empty(len(logprobs), _row_type(num_top := top_ids.shape[1]))
    rows["logprob"], rows["rank"], rows["top_ids"], rows["top_logprobs"] = logprobs, ranks, top_ids, top_logprobs
    return PromptScores(num_top, rows.tobytes())


def _row_type(num_top: int) -> np.dtype[Any]:
    return np.dtype(
        [("logprob", _FLOAT), ("rank", _INT), ("top_ids", _INT, (num_top,)), ("top_logprobs", _FLOAT, (num_top,))]
    )


# Vectors of embeddings, as the bytes that they take in frames, and which rows of a prompt they are made of.

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
