"""Native Gated DeltaNet against its definition and its plain twin, compiled for this CPU and for CPUs with fewer
instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.backend import Kernels
from motet.kernels.gated_delta import GatedDelta
from motet.kernels.plain.recurrence import recur
from motet.kernels.recurrence import LayerState, StateBatch
from motet.kernels.step import Embed, MultiplyGate, Program, Recur
from motet.tests.rigs.native_builds import EXAMPLES
from motet.tests.rigs.recurrence_cases import DeltaCase, Shape, defined, floats, make_case
from motet.workers.execution.device_rows import make_inputs
from motet.workers.plan import SequencePlan, StepPlan, packed

# Of float32 by rounding alone; a value at the border of two of bfloat16 may be rounded to either, at each step.
# The norm over a head of small numbers enlarges what sums in another order differ by.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    shape=st.builds(
        Shape,
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([8, 24, 64]),
        st.sampled_from([8, 16, 40, 64]),
        st.sampled_from([1, 2, 4]),
    ),
    sequences=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=7),
    in_place=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_any_shape(
    native: tuple[Kernels, torch.dtype], shape: Shape, sequences: list[list[int]], in_place: bool, seed: int
) -> None:
    """Sources that are no targets stay as they are, and what is between states, too."""
    kernels, dtype = native
    case = make_case(shape, sequences, dtype, seed, in_place=in_place)
    twin = replace(case, pool=case.pool.clone())
    check(compute(kernels, case), case.pool, recur(*arguments(twin)), twin.pool)


@pytest.mark.parametrize("shape", [Shape(2, 1, 128, 128), Shape(1, 3, 24, 40)], ids=str)
def test_long_and_short_sequences(native: tuple[Kernels, torch.dtype], shape: Shape) -> None:
    kernels, dtype = native
    case = make_case(shape, [[200], [1], [63, 1, 66], [1], [64], [1, 1]], dtype)
    expected = defined(case)
    check(compute(kernels, case), case.pool, *expected)


@pytest.mark.parametrize("shape", [Shape(2, 2, 128, 128), Shape(1, 1, 24, 40)], ids=str)
def test_segments_are_one_to_the_last_bit(native: tuple[Kernels, torch.dtype], shape: Shape) -> None:
    """Whether a sequence is computed at once, in parts, or row by row; onto other pages or in place."""
    kernels, dtype = native
    whole = make_case(shape, [[4], [70], [7]], dtype)
    first = replace(whole, pool=whole.pool.clone())
    expected = compute(kernels, first)
    for parts in ([[1, 3], [2, 7, 61], [1, 5, 1]], [[1] * 4, [1] * 70, [1] * 7]):
        for in_place in (False, True):
            other = make_case(shape, parts, dtype, in_place=in_place)
            # The first states are those of `whole`, in other pages; the last ones are compared.
            firsts, lasts = other.batch.sequence_segments[:-1].long(), other.batch.sequence_segments[1:].long() - 1
            source = other.batch.source.clone()
            source[firsts] = whole.batch.source + len(other.pool)
            pool = torch.cat([other.pool, whole.pool])
            found = kernels.recur(whole.x, whole.layer, pool, whole.state, replace(other.batch, source=source))
            assert found.equal(expected)
            for after, page in zip(other.batch.target[lasts], whole.batch.target, strict=True):
                assert pool[after.long()].nan_to_num().equal(first.pool[page.long()].nan_to_num())


def test_no_sequence_changes_another(native: tuple[Kernels, torch.dtype]) -> None:
    """A row's result depends on its own sequence alone, to the last bit."""
    kernels, dtype = native
    case = make_case(Shape(2, 2, 64, 64), [[3], [1], [30], [1]], dtype)
    alone = replace(case, pool=case.pool.clone())
    together = compute(kernels, case)
    for sequence, (start, end) in enumerate([(0, 3), (3, 4), (4, 34), (34, 35)]):
        of_one = slice(sequence, sequence + 1)
        batch = replace(
            alone.batch,
            segment_rows=torch.tensor([0, end - start], dtype=torch.int32),
            sequence_segments=torch.tensor([0, 1], dtype=torch.int32),
            source=alone.batch.source[of_one],
            target=alone.batch.target[of_one],
            is_fresh=alone.batch.is_fresh[of_one],
        )
        found = kernels.recur(case.x[start:end], case.layer, alone.pool, case.state, batch)
        assert found.equal(together[start:end])
    assert floats(alone.pool).view(torch.int32).equal(floats(case.pool).view(torch.int32))


def test_rows_of_a_wider_tensor(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = native
    case = make_case(Shape(1, 2, 24, 16), [[3], [1]], dtype)
    twin = replace(case, pool=case.pool.clone())
    wider = torch.cat([case.x, torch.full((4, 5), torch.nan, dtype=dtype)], 1)[:, : case.layer.width]
    assert compute(kernels, replace(case, x=wider)).equal(compute(kernels, twin))


def test_in_a_step(native: tuple[Kernels, torch.dtype]) -> None:
    """Steps of more and of fewer rows; gates are some columns of a wider register."""
    kernels, dtype = native
    if kernels.step is None:
        pytest.skip("oneDNN's linears serve")
    shape, column = Shape(1, 2, 16, 24), 7
    cases = [make_case(shape, lengths, dtype) for lengths in ([[1]], [[3], [1], [1, 2], [70], [1]], [[2], [1]])]
    layer, state = cases[0].layer, cases[0].state
    result = layer.num_value_heads * layer.value_dim
    x, rule, found = range(3)
    for case in cases:
        operations = (
            Embed(x, case.x, 1.0),
            Recur(x, rule, layer, state),
            MultiplyGate(rule, x, found, column),
            MultiplyGate(found, found, found),
        )
        twin = replace(case, layer=layer, pool=case.pool.clone())
        step = kernels.step.prepare(Program((layer.width, result, result), operations, found), case.pool)
        num_rows = len(case.x)
        plan = [SequencePlan(0, tuple(range(num_rows)), 0, packed(range(num_rows // 16 + 1)), None, None)]
        inputs = make_inputs(StepPlan(0, tuple(plan), (), ()), {}, 16, torch.device("cpu"))
        output = step.run(inputs.token_ids, inputs.attention, None, states=case.batch)
        expected = kernels.multiply_gate(compute(kernels, twin), case.x[:, column : column + result])
        check(output, case.pool, kernels.multiply_gate(expected, expected), twin.pool)


def arguments(case: DeltaCase) -> tuple[torch.Tensor, GatedDelta, torch.Tensor, LayerState, StateBatch]:
    return case.x, case.layer, case.pool, case.state, case.batch


def compute(kernels: Kernels, case: DeltaCase) -> torch.Tensor:
    return kernels.recur(*arguments(case))


def check(found: torch.Tensor, pool: torch.Tensor, expected: torch.Tensor, expected_pool: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(floats(pool), floats(expected_pool), atol=tolerance, rtol=tolerance, equal_nan=True)
