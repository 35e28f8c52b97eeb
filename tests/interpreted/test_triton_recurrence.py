"""Triton's layers with a recurrent state, interpreted on the CPU, against their twins and the rules in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from motet.kernels.backend import triton_kernels
from motet.kernels.plain.recurrence import recur
from motet.tests.rigs.recurrence_cases import (
    Case,
    MambaShape,
    Shape,
    defined,
    floats,
    make_case,
    make_convolution,
    make_mamba,
)

RECUR = triton_kernels(torch.device("cpu"), torch.float32).recur
# Of float32 by rounding alone; a value at the border of two of bfloat16 may be rounded to either, at each step.
# The norm over a head of small numbers enlarges what sums in another order differ by.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.bfloat16]
EXAMPLES = 12
Make = Callable[..., Case[Any]]


@pytest.fixture(autouse=True, scope="module")
def rounding() -> Iterator[None]:
    """The interpreter cuts the bits that bfloat16 has not; a GPU rounds, as torch does."""
    convert = interpreter._convert_float

    def rounded(given: np.ndarray, given_dtype: Any, dtype: Any, mode: Any) -> Any:
        if (given_dtype, dtype) != (tl.float32, tl.bfloat16):
            return convert(given, given_dtype, dtype, mode)
        return torch.from_numpy(np.array(given)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    with mock.patch.object(interpreter, "_convert_float", rounded):
        yield


sequence_lists = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)


def delta(sequences: Sequence[Sequence[int]], dtype: torch.dtype, *, in_place: bool = False) -> Case[Any]:
    return make_case(Shape(1, 2, 24, 40), sequences, dtype, in_place=in_place)


def convolution(sequences: Sequence[Sequence[int]], dtype: torch.dtype, *, in_place: bool = False) -> Case[Any]:
    return make_convolution(200, 3, sequences, dtype, in_place=in_place)


def mamba(sequences: Sequence[Sequence[int]], dtype: torch.dtype, *, in_place: bool = False) -> Case[Any]:
    return make_mamba(MambaShape(2, 2, 24, 40), sequences, dtype, in_place=in_place)


MAKES = [delta, convolution, mamba]


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    shape=st.builds(
        Shape,
        st.integers(1, 2),
        st.integers(1, 3),
        st.sampled_from([8, 24, 64]),
        st.sampled_from([8, 16, 40]),
        st.sampled_from([1, 2, 4]),
    ),
    sequences=sequence_lists,
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_delta(shape: Shape, sequences: list[list[int]], dtype: torch.dtype, in_place: bool, seed: int) -> None:
    check(make_case(shape, sequences, dtype, seed, in_place=in_place))


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    st.sampled_from([1, 16, 40, 200]),
    st.sampled_from([2, 3, 5]),
    sequence_lists,
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_any_convolution(
    num_channels: int, kernel: int, sequences: list[list[int]], dtype: torch.dtype, in_place: bool
) -> None:
    check(make_convolution(num_channels, kernel, sequences, dtype, in_place=in_place))


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    shape=st.builds(
        MambaShape,
        st.integers(1, 2),
        st.integers(1, 3),
        st.sampled_from([8, 24, 64]),
        st.sampled_from([5, 16, 40]),
        st.sampled_from([2, 4]),
        st.sampled_from(["after the gate", "before the gate", "none"]),
    ),
    sequences=sequence_lists,
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_mamba(
    shape: MambaShape, sequences: list[list[int]], dtype: torch.dtype, in_place: bool, seed: int
) -> None:
    check(make_mamba(shape, sequences, dtype, seed, in_place=in_place))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [Shape(1, 2, 128, 128), Shape(1, 1, 24, 40)], ids=str)
def test_delta_is_its_definition(shape: Shape, dtype: torch.dtype) -> None:
    case = make_case(shape, [[20], [1], [3, 1, 17], [1]], dtype)
    expected, pool = defined(case)
    compare(compute(case), case.pool, expected.to(dtype), pool)


@pytest.mark.parametrize("make", MAKES)
def test_segments_are_one_to_the_last_bit(make: Make) -> None:
    """Whether a sequence is computed at once, in parts, or row by row; onto other pages or in place."""
    whole = make([[4], [19], [7]], torch.bfloat16)
    first = replace(whole, pool=whole.pool.clone())
    expected = compute(first)
    for parts in ([[1, 3], [2, 16, 1], [1, 5, 1]], [[1] * 4, [1] * 19, [1] * 7]):
        for in_place in (False, True):
            other = make(parts, torch.bfloat16, in_place=in_place)
            # The first states are those of `whole`, in other pages; the last ones are compared.
            firsts, lasts = other.batch.sequence_segments[:-1].long(), other.batch.sequence_segments[1:].long() - 1
            source = other.batch.source.clone()
            source[firsts] = whole.batch.source + len(other.pool)
            pool, batch = torch.cat([other.pool, whole.pool]), replace(other.batch, source=source)
            assert RECUR(whole.x, whole.layer, pool, whole.state, batch).equal(expected)
            for after, page in zip(other.batch.target[lasts], whole.batch.target, strict=True):
                assert pool[after.long()].nan_to_num().equal(first.pool[page.long()].nan_to_num())


@pytest.mark.parametrize("make", MAKES)
def test_no_sequence_changes_another(make: Make) -> None:
    """A row's result depends on its own sequence alone, to the last bit."""
    case = make([[3], [1], [18], [1]], torch.bfloat16)
    alone = replace(case, pool=case.pool.clone())
    together = compute(case)
    for sequence, (start, end) in enumerate([(0, 3), (3, 4), (4, 22), (22, 23)]):
        of_one = slice(sequence, sequence + 1)
        batch = replace(
            alone.batch,
            segment_rows=torch.tensor([0, end - start], dtype=torch.int32),
            sequence_segments=torch.tensor([0, 1], dtype=torch.int32),
            source=alone.batch.source[of_one],
            target=alone.batch.target[of_one],
            is_fresh=alone.batch.is_fresh[of_one],
        )
        assert RECUR(case.x[start:end], case.layer, alone.pool, case.state, batch).equal(together[start:end])
    assert floats(alone.pool).view(torch.int32).equal(floats(case.pool).view(torch.int32))


@pytest.mark.parametrize("make", MAKES)
def test_padding_writes_no_state(make: Make) -> None:
    """As recorded steps have it behind their rows."""
    case = make([[1], [1], [1]], torch.float32)
    whole, before = replace(case, pool=case.pool.clone()), case.pool.clone()
    expected = recur(*arguments(whole))
    case.batch.target[1:], case.batch.is_fresh[1:] = -1, True
    found = compute(case)
    assert found.isfinite().all()
    pages = case.batch.target[0].tolist()
    others = [page for page in range(len(before)) if page not in pages]
    compare(found[:1], case.pool[pages], expected[:1], whole.pool[pages])
    assert floats(case.pool[others]).view(torch.int32).equal(floats(before[others]).view(torch.int32))


def test_rows_of_a_wider_tensor() -> None:
    case = delta([[3], [1]], torch.float32)
    twin = replace(case, pool=case.pool.clone())
    wider = torch.cat([case.x, torch.full((4, 5), torch.nan)], 1)[:, : case.layer.width]
    assert compute(replace(case, x=wider)).equal(compute(twin))


@pytest.mark.parametrize("make", MAKES)
def test_no_rows(make: Make) -> None:
    case = make([[2]], torch.float32)
    assert RECUR(case.x[:0], case.layer, case.pool, case.state, case.batch).shape == (0, case.layer.num_out)


def arguments(case: Case[Any]) -> tuple[Any, ...]:
    return case.x, case.layer, case.pool, case.state, case.batch


def compute(case: Case[Any]) -> torch.Tensor:
    return RECUR(*arguments(case))


def check(case: Case[Any]) -> None:
    """Sources that are no targets stay as they are, and what is between states, too."""
    twin = replace(case, pool=case.pool.clone())
    compare(compute(case), case.pool, recur(*arguments(twin)), twin.pool)


def compare(found: torch.Tensor, pool: torch.Tensor, expected: torch.Tensor, expected_pool: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(floats(pool), floats(expected_pool), atol=tolerance, rtol=tolerance, equal_nan=True)
