"""Native sampling against the plain twin, compiled for this CPU and for CPUs with fewer instructions.

`tests/workers/test_token_choice.py` holds both against the definition; `tests/kernels/test_sanitizers.py` runs this
file once more.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.plain.sampling import PlainSampling
from motet.kernels.sampling import NOT_FINITE, Draw, DrawParams, SamplingKernels
from motet.tests.rigs.native_builds import BUILDS, EXAMPLES, HERE, load_build
from motet.tests.rigs.sampling_definition import FILTERS, GRID, draw_with

VOCAB = 5003
TWIN = PlainSampling()


@pytest.fixture(scope="module", params=[build for build in BUILDS if build[0] == torch.float32], ids=str)
def native(request: pytest.FixtureRequest) -> SamplingKernels:
    """The sampling kernels of each build; logits are always float32."""
    return load_build(request.param).sampling


def random_logits(num_rows: int, vocab: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@settings(deadline=None, max_examples=4 * EXAMPLES)
@given(
    vocab=st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, VOCAB])),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 200.0]),
    temperature=st.one_of(st.floats(0.05, 5), st.sampled_from([1e-300, 1e-6, 1e6])),
    filters=st.fixed_dictionaries(FILTERS),
    uniform=st.floats(1e-9, 1 - 1e-9),  # beyond, how sums were rounded decides; see below
    seed=st.integers(0, 2**20),
)
def test_draws_are_the_twins(
    native: SamplingKernels,
    vocab: int,
    spread: float,
    temperature: float,
    filters: dict[str, float],
    uniform: float,
    seed: int,
) -> None:
    """Two rows of four, each with its own `Draw`. Where tokens are equally likely the logit is the same."""
    logits = random_logits(4, vocab, spread, seed)
    wanted = [draw_with(uniform, temperature=temperature, **filters), draw_with(uniform, top_p=0.5)]
    actual, expected = native.draw(logits, [3, 1], wanted), TWIN.draw(logits, [3, 1], wanted)
    assert actual.dtype == torch.int64
    assert logits[[3, 1], actual].tolist() == logits[[3, 1], expected].tolist()


@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
def test_every_draw_of_a_fine_grid(native: SamplingKernels, spread: float) -> None:
    """All filters together and alone, for flat to steep distributions."""
    logits = random_logits(1, VOCAB, spread, seed=3)
    wanted = [
        draw_with(i / 7, temperature=temperature, **dict(zip(GRID, filters, strict=True)))
        for temperature, *filters in product((0.5, 1.0), *GRID.values())
        for i in range(7)
    ]
    rows = [0] * len(wanted)
    assert torch.equal(native.draw(logits, rows, wanted), TWIN.draw(logits, rows, wanted))


def test_equally_likely_tokens_are_taken_in_their_order(native: SamplingKernels) -> None:
    logits = torch.zeros(1, 1000)
    pairs = ((10, 1.0), (0, 0.25), (100, 0.5), (0, 1.0))
    wanted = [draw_with(0.9999, top_k=top_k, top_p=top_p) for top_k, top_p in pairs]
    assert native.draw(logits, [0] * 4, wanted).tolist() == [9, 249, 49, 999]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_draw_tokens_that_are_left(native: SamplingKernels, uniform: float) -> None:
    for spread, top_k, top_p, min_p in product((0.1, 3.0, 300.0), (0, 5), (1.0, 0.8), (0.0, 0.01)):
        logits = random_logits(1, VOCAB, spread, seed=1)
        token = int(native.draw(logits, [0], [draw_with(uniform, top_k=top_k, top_p=top_p, min_p=min_p)]))
        assert logits[0, token] > logits.max() - 701
        if top_k:
            assert token in logits[0].topk(top_k).indices.tolist()
        if top_k or top_p < 1 or min_p:
            assert uniform > 0 or token == int(logits.argmax())


def test_tokens_without_weight_are_never_drawn(native: SamplingKernels) -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [5, 550]] = 1.0
    for top_k, top_p, min_p in product((0, 1, 5, 600), (1.0, 0.999), (0.0, 0.1)):
        params = DrawParams(top_k=top_k, top_p=top_p, min_p=min_p)
        wanted = [Draw(params, uniform) for uniform in (0.0, 0.3, 0.7, 1 - 2**-53)]
        assert set(native.draw(logits, [0] * 4, wanted).tolist()) <= {5, 550}


def test_strided_rows_on_several_threads_and_after_wider_ones() -> None:
    """Buffers that a thread keeps from call to call do not change results."""
    one, two = (load_build((torch.float32, threads, HERE)).sampling for threads in (1, 2))
    wide = random_logits(40, 3001, 2.0, seed=0)
    wanted = [draw_with(i / 40, top_p=0.9) for i in range(40)]
    rows = list(range(40))
    for logits in (wide, wide[:, :70], wide[:, 1000:2000], wide.t().contiguous().t()):
        expected = TWIN.draw(logits, rows, wanted).tolist()
        assert one.draw(logits, rows, wanted).tolist() == expected
        assert two.draw(logits, rows, wanted).tolist() == expected
        assert one.highest(logits).tolist() == two.highest(logits).tolist() == logits.argmax(-1).tolist()
    assert one.draw(wide, [], []).tolist() == []
    assert one.highest(wide[:0]).tolist() == []


@settings(deadline=None, max_examples=4 * EXAMPLES)
@given(
    vocab=st.one_of(st.integers(1, 70), st.sampled_from([2047, 2048, 2049, 4096, VOCAB])),
    num_values=st.sampled_from([1, 2, 1000]),  # few: several of a row are the highest
    odd=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, VOCAB), st.sampled_from([torch.nan, torch.inf, -torch.inf])),
        max_size=4,
    ),
    seed=st.integers(0, 2**20),
)
def test_the_highest_is_the_twins(
    native: SamplingKernels, vocab: int, num_values: int, odd: list[tuple[int, int, float]], seed: int
) -> None:
    logits = torch.randint(-num_values, num_values, (4, vocab), generator=torch.Generator().manual_seed(seed)).float()
    for row, place, value in odd:
        logits[row, place % vocab] = value
    expected = []
    for row in logits:
        is_good = not row.isnan().any() and row.max().isfinite()
        expected.append(int((row == row.max()).nonzero()[0]) if is_good else NOT_FINITE)
    assert native.highest(logits).tolist() == expected
    assert TWIN.highest(logits).tolist() == expected


@settings(deadline=None, max_examples=4 * EXAMPLES)
@given(
    vocab=st.one_of(st.integers(1, 100), st.sampled_from([2047, 2048, 2080, 4096, VOCAB])),
    spread=st.sampled_from([0.0, 1.0, 200.0]),
    shares=st.lists(st.sampled_from([None, 0.0, 0.002, 0.5, 0.998, 1.0]), min_size=4, max_size=4),
    odd=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, VOCAB), st.sampled_from([torch.nan, torch.inf, -torch.inf])),
        max_size=3,
    ),
    how=st.sampled_from(
        [
            draw_with(0.7),
            draw_with(0.4, temperature=0.3, top_k=5, min_p=0.01),
            draw_with(0.99, temperature=2.0, top_p=0.9),
        ]
    ),
    seed=st.integers(0, 2**20),
)
def test_what_masks_leave_is_as_if_there_were_no_other_tokens(
    native: SamplingKernels,
    vocab: int,
    spread: float,
    shares: list[float | None],
    odd: list[tuple[int, int, float]],
    how: Draw,
    seed: int,
) -> None:
    """`shares`: of the tokens that each row may have; None: it has no mask. Bits behind the vocabulary say nothing."""
    logits = random_logits(4, vocab, spread, seed)
    for row, place, value in odd:
        logits[row, place % vocab] = value
    bits, left = np.random.default_rng(seed), logits.clone()
    masks = dict[int, bytes]()
    for row, share in enumerate(shares):
        if share is not None:
            allowed = bits.random(-(-vocab // 32) * 32) < share
            masks[row] = np.packbits(allowed, bitorder="little").tobytes()
            left[row, torch.from_numpy(~allowed[:vocab])] = -torch.inf
    before, expected = logits.clone(), TWIN.highest(left).tolist()
    assert native.highest(logits, masks).tolist() == TWIN.highest(logits, masks).tolist() == expected
    rows = [row for row in (3, 0, 2, 1) if expected[row] != NOT_FINITE]
    drawn, of_left = native.draw(logits, rows, [how] * len(rows), masks), TWIN.draw(left, rows, [how] * len(rows))
    assert left[rows, drawn].tolist() == left[rows, of_left].tolist()
    assert torch.equal(logits, before) or before.isnan().any()


def test_a_row_without_any_weight_has_no_highest(native: SamplingKernels) -> None:
    logits = torch.full((2, 4100), -torch.inf)
    logits[1, 4099] = -3e38
    assert native.highest(logits).tolist() == TWIN.highest(logits).tolist() == [NOT_FINITE, 4099]
