"""Native short convolutions and Mamba-2 against their plain twins, compiled for this CPU and for CPUs with fewer
instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.backend import Kernels
from motet.kernels.plain.recurrence import recur
from motet.kernels.step import Embed, Program, Recur
from motet.tests.rigs.native_builds import EXAMPLES
from motet.tests.rigs.recurrence_cases import Case, MambaShape, floats, make_convolution, make_mamba
from motet.workers.execution.device_rows import make_inputs
from motet.workers.plan import SequencePlan, StepPlan, packed

# Of float32 by rounding alone; a value at the border of two of bfloat16 may be rounded to either, at each step.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
sequence_lists = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=7)
Make = Callable[..., Case[Any]]


def _convolution(sequences: Sequence[Sequence[int]], dtype: torch.dtype, *, in_place: bool = False) -> Case[Any]:
    return make_convolution(200, 3, sequences, dtype, in_place=in_place)


def _mamba(sequences: Sequence[Sequence[int]], dtype: torch.dtype, *, in_place: bool = False) -> Case[Any]:
    return make_mamba(MambaShape(2, 3, 64, 128), sequences, dtype, in_place=in_place)


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.sampled_from([1, 16, 40, 200]), st.sampled_from([2, 3, 5]), sequence_lists, st.booleans())
def test_any_convolution(
    native: tuple[Kernels, torch.dtype], num_channels: int, kernel: int, sequences: list[list[int]], in_place: bool
) -> None:
    kernels, dtype = native
    _check(kernels, make_convolution(num_channels, kernel, sequences, dtype, in_place=in_place))


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    shape=st.builds(
        MambaShape,
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([8, 24, 64]),
        st.sampled_from([5, 16, 40]),
        st.sampled_from([2, 4]),
        st.sampled_from(["after the gate", "before the gate", "none"]),
    ),
    sequences=sequence_lists,
    in_place=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_mamba(
    native: tuple[Kernels, torch.dtype], shape: MambaShape, sequences: list[list[int]], in_place: bool, seed: int
) -> None:
    kernels, dtype = native
    _check(kernels, make_mamba(shape, sequences, dtype, seed, in_place=in_place))


@pytest.mark.parametrize("make", [_convolution, _mamba])
def test_long_and_short_sequences(native: tuple[Kernels, torch.dtype], make: Make) -> None:
    kernels, dtype = native
    _check(kernels, make([[200], [1], [63, 1, 66], [1], [64], [1, 1]], dtype))


@pytest.mark.parametrize("make", [_convolution, _mamba])
def test_segments_are_one_to_the_last_bit(native: tuple[Kernels, torch.dtype], make: Make) -> None:
    """Whether a sequence is computed at once, in parts, or row by row; onto other pages or in place."""
    kernels, dtype = native
    whole = make([[4], [70], [7]], dtype)
    first = replace(whole, pool=whole.pool.clone())
    expected = kernels.recur(first.x, first.layer, first.pool, first.state, first.batch)
    for parts in ([[1, 3], [2, 7, 61], [1, 5, 1]], [[1] * 4, [1] * 70, [1] * 7]):
        for in_place in (False, True):
            other = make(parts, dtype, in_place=in_place)
            # The first states are those of `whole`, in other pages; the last ones are compared.
            firsts, lasts = other.batch.sequence_segments[:-1].long(), other.batch.sequence_segments[1:].long() - 1
            source = other.batch.source.clone()
            source[firsts] = whole.batch.source + len(other.pool)
            pool, batch = torch.cat([other.pool, whole.pool]), replace(other.batch, source=source)
            assert kernels.recur(whole.x, whole.layer, pool, whole.state, batch).equal(expected)
            for after, page in zip(other.batch.target[lasts], whole.batch.target, strict=True):
                assert pool[after.long()].nan_to_num().equal(first.pool[page.long()].nan_to_num())


@pytest.mark.parametrize("make", [_convolution, _mamba])
def test_in_a_step(native: tuple[Kernels, torch.dtype], make: Make) -> None:
    """Steps of more and of fewer rows."""
    kernels, dtype = native
    if kernels.step is None:
        pytest.skip("oneDNN's linears serve")
    cases = [make(lengths, dtype) for lengths in ([[1]], [[3], [1], [1, 2], [70], [1]], [[2], [1]])]
    rule, state = cases[0].layer, cases[0].state
    for case in cases:
        operations = (Embed(0, case.x, 1.0), Recur(0, 1, rule, state))
        twin = replace(case, pool=case.pool.clone())
        step = kernels.step.prepare(Program((rule.width, rule.num_out), operations, 1), case.pool)
        num_rows = len(case.x)
        plan = [SequencePlan(0, tuple(range(num_rows)), 0, packed(range(num_rows // 16 + 1)), None, None)]
        inputs = make_inputs(StepPlan(0, tuple(plan), (), ()), {}, 16, torch.device("cpu"))
        output = step.run(inputs.token_ids, inputs.attention, None, states=case.batch)
        assert output.equal(kernels.recur(twin.x, rule, twin.pool, state, twin.batch))
        assert floats(case.pool).view(torch.int32).equal(floats(twin.pool).view(torch.int32))


def _check(kernels: Kernels, case: Case[Any]) -> None:
    """Sources that are no targets stay as they are, and what is between states, too."""
    pool, tolerance = case.pool.clone(), TOLERANCE[case.x.dtype]
    found = kernels.recur(case.x, case.layer, case.pool, case.state, case.batch)
    expected = recur(case.x, case.layer, pool, case.state, case.batch)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(floats(case.pool), floats(pool), atol=tolerance, rtol=tolerance, equal_nan=True)
