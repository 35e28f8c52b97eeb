"""Sampling in C++ (`cpp/sampling.h`): checks and passes the arguments."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch

from ..sampling import NO_MASKS, Draw, Penalty


class NativeSampling:
    """`sampling.SamplingKernels` on a CPU."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._num_threads = num_threads
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._draw = library["draw_tokens"]
        self._draw.argtypes = [pointer, number, number, pointer, pointer, number, pointer, pointer, ctypes.c_int]
        self._highest = library["highest_tokens"]
        self._highest.argtypes = [pointer, number, number, pointer, number, pointer, ctypes.c_int]
        self._penalise = library["penalise_tokens"]
        self._penalise.argtypes = [pointer, number, pointer, number, pointer, ctypes.c_int]
        self._draw.restype = self._highest.restype = self._penalise.restype = None

    def penalise(self, logits: torch.Tensor, rows: Sequence[int], penalties: Sequence[Penalty]) -> None:
        """See `sampling.SamplingKernels`."""
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are float32, rows contiguous"
        assert len(rows) == len(penalties), "a penalty for each row"
        table = array("q")
        for row, each in zip(rows, penalties, strict=True):
            assert 0 <= row < len(logits) and len(each.token_ids) == len(each.counts), "a count for each token"
            table.extend((row, len(each.token_ids), each.token_ids.buffer_info()[0], each.counts.buffer_info()[0]))
        factors = array("d", [x for each in penalties for x in (each.repetition, each.presence, each.frequency)])
        self._penalise(
            logits.data_ptr(),
            logits.stride(0),
            table.buffer_info()[0],
            len(rows),
            factors.buffer_info()[0],
            self._num_threads,
        )

    def highest(self, logits: torch.Tensor, masks: Mapping[int, bytes] = NO_MASKS) -> torch.Tensor:
        """See `sampling.SamplingKernels`."""
        logits = _readable(logits)
        num_rows, vocab = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64)
        self._highest(
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            _table(masks, logits),
            num_rows,
            tokens.data_ptr(),
            self._num_threads,
        )
        return tokens

    def draw(
        self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw], masks: Mapping[int, bytes] = NO_MASKS
    ) -> torch.Tensor:
        """See `sampling.SamplingKernels`. Of equally likely tokens the first in the vocabulary counts as likelier."""
        assert len(rows) == len(draws), "a draw for each row"
        logits = _readable(logits)
        wanted = [(each.temperature, each.top_p, each.min_p, each.uniform, float(each.top_k)) for each in draws]
        table = torch.tensor(wanted, dtype=torch.float64).view(-1, 5)
        places, tokens = torch.tensor(rows, dtype=torch.int64), torch.empty(len(rows), dtype=torch.int64)
        self._draw(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            _table(masks, logits),
            places.data_ptr(),
            len(rows),
            table.data_ptr(),
            tokens.data_ptr(),
            self._num_threads,
        )
        return tokens


def _table(masks: Mapping[int, bytes], logits: torch.Tensor) -> ctypes.Array[ctypes.c_char_p] | None:
    """Pointers to the masks, by row; None: there are none."""
    if not masks:
        return None
    num_rows, vocab = logits.shape
    assert all(len(mask) == 4 * -(-vocab // 32) for mask in masks.values()), "a mask has a bit for each token"
    return (ctypes.c_char_p * num_rows)(*(masks.get(row) for row in range(num_rows)))


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """`logits` `[num_rows, vocab]` if each row is contiguous, else a copy of which this is true."""
    assert logits.dtype == torch.float32 and logits.shape[1] > 0, "logits are float32 over a vocabulary"
    return logits if logits.stride(1) == 1 else logits.contiguous()
