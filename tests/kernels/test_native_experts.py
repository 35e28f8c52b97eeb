"""Native products of experts against the plain twin, compiled for this CPU and for CPUs with fewer instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.experts import ExpertGroups, Routing, choose_experts
from motet.kernels.native.build import NativeUnavailable, load_library
from motet.kernels.native.experts import NativeExperts, PackedExperts
from motet.kernels.native.linear import NativeLinear
from motet.kernels.plain.experts import PlainExperts
from motet.tests.rigs.native_builds import BUILDS, EXAMPLES, SANITIZERS, Build, close


def load(build: Build) -> NativeExperts:
    """The native kernels, even where oneDNN would be chosen. Skips where they cannot be compiled."""
    dtype, num_threads, flags = build
    try:
        library = load_library(flags=[*flags, *SANITIZERS])
    except NativeUnavailable as problem:
        pytest.skip(str(problem))
    return NativeExperts(library, NativeLinear(library, dtype, num_threads), num_threads)


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def native(request: pytest.FixtureRequest) -> tuple[NativeExperts, torch.dtype]:
    return load(request.param), request.param[0]


def pack(kernels: NativeExperts, weight: torch.Tensor) -> PackedExperts:
    """The packed weight in memory of its own, so that a sanitizer finds reads beyond its end."""
    packed = kernels.pack(weight)
    return replace(packed, panels=packed.panels.clone())


def draw(num_experts: int, num_out: int, num_in: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    scale: float = num_in**-0.5
    return (torch.randn(num_experts, num_out, num_in, generator=generator) * scale).to(dtype)


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    num_rows=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 3),
    num_in=st.integers(1, 130),
    num_out=st.integers(1, 200),
    seed=st.integers(0, 2**20),
)
def test_each_pair_goes_through_its_own_expert(
    native: tuple[NativeExperts, torch.dtype],
    num_rows: int,
    num_experts: int,
    top_k: int,
    num_in: int,
    num_out: int,
    seed: int,
) -> None:
    """Some experts get most rows and others none; some belong to another worker. NaN surrounds the columns of x."""
    (kernels, dtype), generator = native, torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, num_experts, generator=generator) * 4
    chosen, weights = choose_experts(logits, Routing(min(top_k, num_experts)))
    first = num_experts // 3
    groups = kernels.group(chosen, weights, first, num_experts - first)
    weight = draw(num_experts - first, num_out, num_in, dtype, generator)
    wide = torch.full((len(groups.rows), num_in + 9), float("nan"), dtype=dtype)
    wide[:, 4 : 4 + num_in] = torch.randn(len(wide), num_in, generator=generator).to(dtype)
    x = wide[:, 4 : 4 + num_in]
    bias = torch.randn(len(weight), num_out, generator=generator).to(dtype) if seed % 2 else None
    actual = kernels.linear(x, pack(kernels, weight), groups, bias)
    # Without NaN beside it: with AMX, oneDNN multiplies what lies beyond a row of an odd length by zero, too.
    expected = PlainExperts().linear(x.contiguous(), weight, groups, bias)
    assert actual.shape == expected.shape and actual.dtype == dtype
    close(actual, expected)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_a_pair_is_the_same_to_the_last_bit_with_any_others_and_on_any_threads(build: Build) -> None:
    generator = torch.Generator().manual_seed(0)
    kernels, one = load(build), load((build[0], 1, build[2]))
    x, weight = torch.randn(90, 96, generator=generator).to(build[0]), draw(4, 150, 96, build[0], generator)
    packed, offsets = one.pack(weight), [0, 1, 1, 60, 90]

    def groups(offsets: list[int]) -> ExpertGroups:
        return ExpertGroups(torch.arange(90), torch.ones(90), torch.tensor(offsets))

    together = kernels.linear(x, packed, groups(offsets))
    for expert, (start, end) in enumerate(pairwise(offsets)):
        for pair in range(start, end):
            alone = groups([0] * (expert + 1) + [1] * (4 - expert))
            assert torch.equal(one.linear(x[pair : pair + 1], packed, alone), together[pair : pair + 1])


def test_what_does_not_fit_together_is_refused(native: tuple[NativeExperts, torch.dtype]) -> None:
    kernels, dtype = native
    weight = kernels.pack(torch.zeros(3, 8, 16, dtype=dtype))
    chosen, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(AssertionError, match="groups are of these experts"):
        kernels.linear(torch.zeros(2, 16, dtype=dtype), weight, kernels.group(chosen, weights, 0, 4))
    with pytest.raises(AssertionError, match="x has the weight's inputs"):
        kernels.linear(torch.zeros(2, 17, dtype=dtype), weight, kernels.group(chosen, weights, 0, 3))
    for num_pairs in (0, 1, 3):
        with pytest.raises(AssertionError, match="as many rows as the groups have pairs"):
            kernels.linear(torch.zeros(num_pairs, 16, dtype=dtype), weight, kernels.group(chosen, weights, 0, 3))
    groups = kernels.group(chosen, weights, 0, 3)
    with pytest.raises(AssertionError, match="groups are of these experts"):
        kernels.linear(torch.zeros(2, 16, dtype=dtype), weight, replace(groups, offsets=groups.offsets.int()))


def test_rows_that_are_not_contiguous(native: tuple[NativeExperts, torch.dtype]) -> None:
    (kernels, dtype), generator = native, torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 40, generator=generator).to(dtype), draw(2, 24, 40, dtype, generator)
    groups, columns = ExpertGroups(torch.arange(9), torch.ones(9), torch.tensor([0, 4, 9])), x.t().contiguous().t()
    assert columns.stride(1) != 1
    packed = kernels.pack(weight)
    assert torch.equal(kernels.linear(columns, packed, groups), kernels.linear(x, packed, groups))
