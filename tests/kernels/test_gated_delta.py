"""The plain twin of Gated DeltaNet against its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from motet.kernels.norms import multiply_gate
from motet.kernels.plain.recurrence import recur
from motet.tests.rigs.recurrence_cases import Shape, defined, floats, make_case

SHAPES = [
    Shape(2, 1, 8, 16),
    Shape(1, 3, 24, 40),
    Shape(2, 2, 8, 24, kernel=2),
    Shape(1, 1, 128, 128),
    Shape(1, 2, 16, 8, kernel=1),
]
STEPS = [[[1], [1], [1], [1]], [[5], [1], [2, 1, 4], [1], [3, 3], [1, 1]], [[23], [40]]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_twin_is_what_the_contract_says(shape: Shape, dtype: torch.dtype) -> None:
    """Decodes, prompts, segments that go on from others, fresh ones; a source that is no target stays as it is."""
    for seed, lengths in enumerate(STEPS):
        case = make_case(shape, lengths, dtype, seed)
        expected, pool = defined(case)
        found = recur(case.x, case.layer, case.pool, case.state, case.batch)
        # A value at the border of two of bfloat16 may be rounded to either.
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(floats(case.pool), floats(pool), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_segments_give_what_the_whole_gives(dtype: torch.dtype) -> None:
    """Whether a sequence is computed at once, in parts, or row by row; onto other pages or in place."""
    shape = Shape(2, 2, 24, 40)
    whole = make_case(shape, [[4], [13], [7]], dtype)
    expected = recur(whole.x, whole.layer, whole.pool, whole.state, whole.batch)
    for parts in ([[1, 3], [2, 7, 4], [1, 5, 1]], [[1] * 4, [1] * 13, [1] * 7]):
        for in_place in (False, True):
            other = make_case(shape, parts, dtype, in_place=in_place)
            # The first states are those of `whole`, in other pages.
            firsts = other.batch.sequence_segments[:-1]
            again = make_case(shape, [[4], [13], [7]], dtype)
            source = other.batch.source.clone()
            source[firsts] = again.batch.source
            pool = torch.cat([other.pool, again.pool[:, :, : other.pool.shape[2]]])
            source[firsts] += len(other.pool)
            batch = replace(other.batch, source=source)
            found = recur(whole.x, whole.layer, pool, whole.state, batch)
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 5, 24, generator=generator).to(dtype)
    expected = x.double() * gate.double().sigmoid().to(dtype).double()
    torch.testing.assert_close(multiply_gate(x, gate), expected.to(dtype))
