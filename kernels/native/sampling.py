"""Sampling in C++ (`cpp/sampling.h`): checks and passes the arguments."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from ..sampling import Draw, Penalty


class NativeSampling:
    """`sampling.SamplingKernels` on a CPU."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._num_threads = num_threads
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._draw = library["draw_tokens"]
        self._draw.argtypes = [pointer, number, number, pointer, number, pointer, pointer, ctypes.c_int]
        self._highest = library["highest_tokens"]
        self._highest.argtypes = [pointer, number, number, number, pointer, ctypes.c_int]
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

    def highest(self, logits: torch.Tensor) -> torch.Tensor:
        """See `sampling.SamplingKernels`."""
        logits = _readable(logits)
        num_rows, vocab = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64)
        self._highest(logits.data_ptr(), logits.stride(0), vocab, num_rows, tokens.data_ptr(), self._num_threads)
        return tokens

    def draw(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> torch.Tensor:
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
            places.data_ptr(),
            len(rows),
            table.data_ptr(),
            tokens.data_ptr(),
            self._num_threads,
        )
        return tokens


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """`logits` `[num_rows, vocab]` if each row is contiguous, else a copy of which this is true."""
    assert logits.dtype == torch.float32 and logits.shape[1] > 0, "logits are float32 over a vocabulary"
    return logits if logits.stride(1) == 1 else logits.contiguous()
