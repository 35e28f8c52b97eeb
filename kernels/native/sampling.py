"""Sampling in C++ (`cpp/sampling.h`): checks and passes the arguments."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from ..sampling import NO_MASKS, NUM_DRAW_NUMBERS, PENALTIES, Draw, Penalty, draw_numbers, penalty_numbers
from .build import kernel


class NativeSampling:
    """`sampling.SamplingKernels` on a CPU."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._num_threads = num_threads
        self._draw = kernel(library, "draw_tokens", "pnnppnppi")
        self._highest = kernel(library, "highest_tokens", "pnnpnpi")
        self._penalise = kernel(library, "penalise_tokens", "pnpnpi")
        sizes = (library["num_draw_numbers"](), library["num_penalty_numbers"]())
        assert sizes == (NUM_DRAW_NUMBERS, len(PENALTIES)), "C++ has the parameters of sampling.py"

    def penalise(self, logits: torch.Tensor, rows: Sequence[int], penalties: Sequence[Penalty]) -> None:
        """See `sampling.SamplingKernels`."""
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits are float32, rows contiguous"
        assert len(rows) == len(penalties), "a penalty for each row"
        table = array("q")
        for row, each in zip(rows, penalties, strict=True):
            assert 0 <= row < len(logits) and len(each.token_ids) == len(each.counts), "a count for each token"
            table.extend((row, len(each.token_ids), each.token_ids.buffer_info()[0], each.counts.buffer_info()[0]))
        factors = array("d", chain.from_iterable(penalty_numbers(each.params) for each in penalties))
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
        numbers = [(*draw_numbers(each.params), each.uniform) for each in draws]
        table = torch.tensor(numbers, dtype=torch.float64)
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
