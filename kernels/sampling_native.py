"""Draws of tokens in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from .sampling import Draw


class NativeSampling:
    """`sampling.DrawTokens` on a CPU."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._num_threads = num_threads
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._draw = library["draw_tokens"]
        self._draw.argtypes = [pointer, number, number, pointer, number, pointer, pointer, ctypes.c_int]
        self._draw.restype = None

    def draw(self, logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> torch.Tensor:
        """See `sampling.DrawTokens`. Of equally likely tokens the first counts as the likeliest."""
        assert logits.dtype == torch.float32 and len(rows) == len(draws), "float32, and a draw for each row"
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
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
