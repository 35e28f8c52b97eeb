"""Native linears of weights of four and eight bits against the twin, for this CPU and for CPUs with fewer instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import Kernels, with_quantised_weights
from motet.kernels.experts import ExpertGroups, Routing, choose_experts
from motet.kernels.native import quantised_linear
from motet.kernels.native.quantised_linear import NativeQuantised, PackedBytes, PackedCodes, PackedExpertCodes
from motet.kernels.plain.quantised import PlainQuantised, quantise_rows
from motet.kernels.quantised import FLOAT4, Numbers, QuantisedWeight, joined
from motet.kernels.step import Embed, Linear, Program
from motet.tests.rigs.native_builds import BUILDS, EXAMPLES, Build, load_build

Packed = PackedBytes | PackedCodes


def quantised(kernels: Kernels, dtype: torch.dtype, num_threads: int = 1) -> NativeQuantised:
    made = with_quantised_weights(kernels, dtype, num_threads, rounds=False).quantised
    assert isinstance(made, NativeQuantised)
    return made


def of_bytes(num_out: int, num_in: int, seed: int = 0) -> QuantisedWeight:
    """With numbers at both ends, -128 among them, which files may have."""
    generator = torch.Generator().manual_seed(seed)
    weight = QuantisedWeight.of_eight_bits(torch.randn(num_out, num_in, generator=generator) / max(1, num_in) ** 0.5)
    weight.codes[:, ::7] = -128
    return weight


def of_codes(
    num_out: int, num_in: int, group_size: int, numbers: Numbers, has_zeros: bool, seed: int = 0
) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(num_in + seed)
    groups = -(-num_in // group_size)
    codes = torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)
    if numbers == "float8":  # of which a third have an exponent of 0
        codes = (torch.randn(num_out, num_in, generator=generator) / 50).to(torch.float8_e4m3fn)
    scales = torch.rand(num_out, groups, generator=generator) / max(1, num_in) ** 0.5
    zeros = torch.full((num_out, groups), 8.0)
    if has_zeros:
        zeros = torch.randint(0, 17, (num_out, groups), generator=generator).float()
    return QuantisedWeight(codes, numbers, scales, zeros if numbers == "uint4" else None, group_size)


def pack(kernels: NativeQuantised, weight: QuantisedWeight) -> Packed:
    """In memory of its own, so that a sanitizer finds reads beyond its end."""
    packed = kernels.pack(weight)
    assert packed is not None
    return replace(packed, panels=packed.panels.clone())


def takes_float8(native: tuple[Kernels, torch.dtype]) -> bool:
    """Whether these kernels multiply float8 as it is, by vectors of pairs of bfloat16; else they decline it."""
    kernels, dtype = native
    is_taken = quantised(kernels, dtype).pack(of_codes(8, 8, 8, "float8", False)) is not None
    assert not is_taken or dtype == torch.bfloat16
    return is_taken


def with_exponents(weight: QuantisedWeight) -> QuantisedWeight:
    """With scales that are powers of two, and zeros."""
    scales = weight.scales.log2().round().exp2()
    scales[::5, 0] = 0.0
    scales[-1, -1] = 2.0**-126
    return replace(weight, scales=scales)


def pack_experts(kernels: NativeQuantised, weights: list[QuantisedWeight]) -> PackedExpertCodes:
    packed = kernels.pack_experts(weights)
    assert packed is not None
    return replace(packed, panels=packed.panels.clone())


def inputs(num_rows: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    """Columns of a tensor that is NaN elsewhere."""
    x = torch.full((num_rows, num_in + 29), torch.nan, dtype=dtype)[:, 5 : 5 + num_in]
    return x.copy_(torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_rows)))


def check(native: tuple[Kernels, torch.dtype], weight: QuantisedWeight, num_rows: int, has_bias: bool) -> None:
    kernels, dtype = native
    num_out, num_in = weight.codes.shape
    x = inputs(num_rows, num_in, dtype)
    bias = torch.randn(num_out, generator=torch.Generator().manual_seed(1)).to(dtype) if has_bias else None
    own = quantised(kernels, dtype)
    actual = own.linear(x, pack(own, weight), bias)
    expected = PlainQuantised(dtype, rounds=False).linear(x, weight, bias)
    # Sums of bytes are exact, and their products with scales may be fused; those of codes run in another order.
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5 if weight.numbers == "int8" else 2e-5)


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    num_rows=st.integers(0, 60),
    num_in=st.one_of(st.integers(1, 70), st.sampled_from([576, 1537])),
    num_out=st.one_of(st.integers(1, 200), st.sampled_from([960, 1000])),
    has_bias=st.booleans(),
)
def test_eight_bits(
    native: tuple[Kernels, torch.dtype], num_rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    check(native, of_bytes(num_out, num_in), num_rows, has_bias)


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    num_rows=st.integers(0, 40),
    num_words=st.one_of(st.integers(1, 12), st.sampled_from([72, 161])),
    num_out=st.one_of(st.integers(1, 200), st.sampled_from([960])),
    group_words=st.sampled_from([1, 2, 4, 5, 16, 17, 40, 1000]),
    numbers=st.sampled_from(["uint4", "float4"]),
    has_zeros=st.booleans(),
    has_bias=st.booleans(),
)
def test_four_bits(
    native: tuple[Kernels, torch.dtype],
    num_rows: int,
    num_words: int,
    num_out: int,
    group_words: int,
    numbers: Numbers,
    has_zeros: bool,
    has_bias: bool,
) -> None:
    """Groups of any number of words, of which the last may have fewer; wide ones are computed in parts."""
    weight = of_codes(num_out, 8 * num_words, 8 * group_words, numbers, has_zeros)
    check(native, weight, num_rows, has_bias)


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    num_rows=st.integers(0, 40),
    num_words=st.one_of(st.integers(1, 12), st.sampled_from([72, 161])),
    num_out=st.one_of(st.integers(1, 200), st.sampled_from([960])),
    group_words=st.sampled_from([1, 4, 5, 16, 1000]),
    has_bias=st.booleans(),
)
def test_float8(
    native: tuple[Kernels, torch.dtype], num_rows: int, num_words: int, num_out: int, group_words: int, has_bias: bool
) -> None:
    if takes_float8(native):
        check(native, of_codes(num_out, 8 * num_words, 8 * group_words, "float8", False), num_rows, has_bias)


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    num_rows=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 3),
    num_words=st.integers(1, 20),
    num_out=st.integers(1, 200),
    group_words=st.sampled_from([1, 4, 5, 17]),
    numbers=st.sampled_from(["uint4", "float4"]),
    has_zeros=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_each_pair_goes_through_its_own_expert(
    native: tuple[Kernels, torch.dtype],
    num_rows: int,
    num_experts: int,
    top_k: int,
    num_words: int,
    num_out: int,
    group_words: int,
    numbers: Numbers,
    has_zeros: bool,
    seed: int,
) -> None:
    """Some experts get most rows and others none; some belong to another worker. Only one may have zero points."""
    (kernels, dtype), generator = native, torch.Generator().manual_seed(seed)
    own, num_in, first = quantised(kernels, dtype), 8 * num_words, num_experts // 3
    weights = [
        of_codes(num_out, num_in, 8 * group_words, numbers, has_zeros and expert == first, expert)
        for expert in range(first, num_experts)
    ]
    if seed % 3 == 0:
        weights = [with_exponents(weight) for weight in weights]
    logits = torch.randn(num_rows, num_experts, generator=generator) * 4
    chosen, factors = choose_experts(logits, Routing(min(top_k, num_experts)))
    groups = kernels.experts.group(chosen, factors, first, num_experts - first)
    x = inputs(len(groups.rows), num_in, dtype)
    bias = torch.randn(len(weights), num_out, generator=generator).to(dtype) if seed % 2 else None
    actual = own.expert_linear(x, pack_experts(own, weights), groups, bias)
    twin = PlainQuantised(dtype, rounds=False)
    together = twin.pack_experts(weights)
    assert together is not None
    expected = twin.expert_linear(x, together, groups, bias)
    rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=2e-5)


def test_wide_inputs(native: tuple[Kernels, torch.dtype]) -> None:
    """Inputs so wide that a block has the fewest rows."""
    for num_rows in (1, 25, 70):
        check(native, of_bytes(48, 8192), num_rows, has_bias=False)
        check(native, of_codes(48, 8192, 128, "uint4", True), num_rows, has_bias=False)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_a_row_is_the_same_to_the_last_bit_with_any_others_and_on_any_threads(build: Build) -> None:
    dtype, kernels = build[0], load_build(build)
    one, two = quantised(kernels, dtype, 1), quantised(kernels, dtype, 2)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(193, 576, generator=generator).to(dtype)
    x[::3] *= torch.randint(-140, 20, (65, 576), generator=generator).float().exp2().to(dtype)  # some next to zero
    kinds = (
        (32, "uint4", True),
        (576, "float4", False),
        (40, "uint4", True),
        (8, "float4", False),
        (136, "uint4", False),
    )
    for weight in (of_bytes(320, 576), *(of_codes(320, 576, *kind) for kind in kinds)):  # type: ignore[arg-type]
        packed = pack(one, weight)
        expected = torch.cat([one.linear(row, packed, None) for row in x.split(1)])
        for num_rows in (1, 2, 3, 5, 6, 7, 64, 193):
            assert torch.equal(two.linear(x[:num_rows], packed, None), expected[:num_rows])


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_a_pair_is_the_same_to_the_last_bit_as_a_row_of_its_expert_alone(build: Build) -> None:
    dtype, kernels = build[0], load_build(build)
    one, two = quantised(kernels, dtype, 1), quantised(kernels, dtype, 2)
    x = torch.randn(90, 96, generator=torch.Generator().manual_seed(5)).to(dtype)
    alone = [[0] * (expert + 1) + [1] * (4 - expert) for expert in range(4)]
    for numbers, has_zeros in (("uint4", True), ("float4", False), ("float8", False)):
        if numbers == "float8" and one.pack(of_codes(8, 8, 8, "float8", False)) is None:
            continue
        weights = [of_codes(150, 96, 32, numbers, has_zeros, expert) for expert in range(4)]  # type: ignore[arg-type]
        packed = pack_experts(one, weights)
        for offsets in ([0, 1, 1, 60, 90], [0, 1, 2, 3, 4], [0, 0, 13, 13, 17]):
            groups = ExpertGroups(torch.arange(90), torch.ones(90), torch.tensor(offsets))
            together = two.expert_linear(x[: offsets[-1]], packed, groups)
            for expert, (start, end) in enumerate(pairwise(offsets)):
                dense = pack(one, weights[expert])
                for pair in range(start, end):
                    row, own = x[pair : pair + 1], replace(groups, offsets=torch.tensor(alone[expert]))
                    assert torch.equal(one.expert_linear(row, packed, own), together[pair : pair + 1])
                    assert torch.equal(one.linear(row, dense, None), together[pair : pair + 1])


def test_scales_that_are_powers_of_two_take_eight_bits(native: tuple[Kernels, torch.dtype]) -> None:
    """MXFP4 has 4.25 bits a weight. Other scales, and powers of two that are no normal numbers, stay as they are."""
    kernels, dtype = native
    own, weights = quantised(kernels, dtype), [of_codes(128, 256, 32, "float4", False, seed) for seed in range(3)]
    experts = pack_experts(own, [with_exponents(weight) for weight in weights])
    assert experts.panels.nbytes + experts.scales.nbytes == 3 * 128 * 256 * 4.25 / 8
    dense = pack(own, with_exponents(weights[0]))
    assert isinstance(dense, PackedCodes) and dense.panels.nbytes + dense.scales.nbytes == 128 * 256 * 4.25 / 8
    for scale in (2.0**-127, -0.5, 0.75):
        mixed = with_exponents(weights[0])
        mixed.scales[3, 2] = scale
        packed = pack(own, mixed)
        assert isinstance(packed, PackedCodes) and packed.scales.dtype == torch.float32
    check(native, with_exponents(weights[0]), 30, has_bias=True)


def test_experts_that_do_not_fit_together(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = native
    own, twin = quantised(kernels, dtype), PlainQuantised(dtype, rounds=False)
    weights = [of_codes(16, 64, 32, "uint4", True, seed) for seed in range(3)]
    for other in (of_codes(16, 64, 32, "float4", False), of_codes(16, 64, 8, "uint4", True)):
        for kind in (own, twin):
            assert kind.pack_experts([*weights, other]) is None
    for kind in (own, twin):
        assert kind.pack_experts([replace(weights[0], group_of=torch.zeros(64, dtype=torch.int64))]) is None
        assert kind.pack_experts([of_bytes(16, 64)]) is None
    assert own.pack_experts([*weights, replace(weights[0], zeros=torch.full((16, 2), 0.5))]) is None
    packed = pack_experts(own, weights)
    groups = ExpertGroups(torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.tensor([0, 1, 2, 2]))
    x = torch.zeros(2, 64, dtype=dtype)
    with pytest.raises(AssertionError, match="groups are of these experts"):
        own.expert_linear(x, packed, replace(groups, offsets=torch.tensor([0, 1, 2])))
    with pytest.raises(AssertionError, match="x has the kernels' dtype, the weight's inputs"):
        own.expert_linear(x[:, :56], packed, groups)
    with pytest.raises(AssertionError, match="as many rows as the groups have pairs"):
        own.expert_linear(x[:1], packed, groups)
    with pytest.raises(AssertionError, match="a bias for each output"):
        own.expert_linear(x, packed, groups, torch.zeros(16, dtype=dtype))


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_eight_bits_are_the_same_to_the_last_bit_on_all_cpus_that_fuse_alike(build: Build) -> None:
    """Rows are rounded as the twin rounds them, and whole numbers are summed: one weight of 1 shows the sums."""
    dtype, kernels = build[0], quantised(load_build(build), build[0])
    weight = replace(of_bytes(40, 300), scales=torch.ones(40, 1))
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(4))
    x = (x / x.abs().amax(1, keepdim=True) * 127).to(torch.bfloat16).to(dtype)
    numbers, scales = quantise_rows(x)
    assert torch.equal(scales, torch.ones(9, 1)), "the largest of each row is 127"
    expected = (numbers.double() @ weight.codes.double().t()).to(dtype)
    assert torch.equal(kernels.linear(x, pack(kernels, weight), None), expected)


def test_rows_that_are_not_finite_give_nan_and_others_do_not(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = native
    own, weight = quantised(kernels, dtype), of_bytes(20, 40)
    x = torch.ones(5, 40, dtype=dtype)
    x[1, 39], x[2, 0], x[3, 7], x[4] = torch.nan, torch.inf, -torch.inf, 0.0
    y = own.linear(x, pack(own, weight), None)
    assert y.isnan().all(1).tolist() == [False, True, True, True, False] and not y[4].any()
    assert (
        PlainQuantised(dtype, rounds=True).linear(x, weight, None).isnan().all(1).tolist() == y.isnan().all(1).tolist()
    )


def test_each_code_is_the_number_that_it_stands_for(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = native
    own = quantised(kernels, dtype)
    codes = (torch.arange(16 * 64) // 64).view(16, 64).to(torch.uint8)  # an output has one code for all its inputs
    x = torch.eye(64, dtype=dtype)
    for numbers, zeros, expected in (
        ("uint4", torch.full((16, 2), 3.0), torch.arange(16.0) - 3),
        ("float4", None, torch.tensor(FLOAT4)),
    ):
        weight = QuantisedWeight(codes, numbers, torch.full((16, 2), 0.5), zeros, 32)  # type: ignore[arg-type]
        y = own.linear(x, pack(own, weight), None)
        assert torch.equal(y.float(), (expected / 2).expand(64, 16))


@pytest.mark.parametrize("num_rows", [1, 100])
def test_each_code_of_float8_is_its_number(native: tuple[Kernels, torch.dtype], num_rows: int) -> None:
    """Those of exponent 0 and zeros of either sign, too; a weight with NaN is not packed."""
    if not takes_float8(native):
        return
    kernels, dtype = native
    own, codes = quantised(kernels, dtype), torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    for scale in (1.0, 0.5):
        codes = numbers.view(torch.uint8).repeat_interleave(8).view(-1, 8).view(torch.float8_e4m3fn)
        weight = QuantisedWeight(codes, "float8", torch.full((254, 1), scale), None, 8)
        x = torch.eye(8).repeat(64, 1)[:num_rows].to(dtype)
        y = own.linear(x, pack(own, weight), None)
        assert torch.equal(y.float(), (numbers.float() * scale).expand(num_rows, 254))
    rounding = with_quantised_weights(kernels, dtype, 1, rounds=True).quantised
    assert rounding is not None and rounding.pack(weight) is None, "whole numbers are asked for"
    with_nan = of_codes(8, 16, 16, "float8", False)
    with_nan.codes[3, 5] = torch.nan
    assert own.pack(with_nan) is None


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_a_row_of_float8_is_the_same_to_the_last_bit(build: Build) -> None:
    dtype, kernels = build[0], load_build(build)
    if not takes_float8((kernels, dtype)):
        return
    one, two = quantised(kernels, dtype, 1), quantised(kernels, dtype, 2)
    x = torch.randn(193, 576, generator=torch.Generator().manual_seed(3)).to(dtype)
    for group_size in (128, 40, 576):
        packed = pack(one, of_codes(320, 576, group_size, "float8", False))
        expected = torch.cat([one.linear(row, packed, None) for row in x.split(1)])
        for num_rows in (1, 2, 7, 64, 193):
            assert torch.equal(two.linear(x[:num_rows], packed, None), expected[:num_rows])


def test_weights_that_are_to_be_dequantised(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = native
    own, codes = quantised(kernels, dtype), of_codes(16, 64, 32, "uint4", True)
    assert own.pack(replace(of_bytes(16, 64), rounds_inputs=False)) is None
    assert own.pack(replace(of_bytes(16, 64), zeros=torch.zeros(16, 1))) is None
    assert own.pack(replace(codes, group_of=torch.zeros(64, dtype=torch.int64))) is None
    assert own.pack(replace(codes, numbers="uint8")) is None
    assert own.pack(codes.columns(4, 64)) is None, "it begins within a group"
    assert own.pack(replace(codes, zeros=torch.full((16, 2), 0.5))) is None
    assert joined([codes, replace(codes, zeros=None)]) is None


def test_inputs_that_begin_within_a_group_have_smaller_groups(native: tuple[Kernels, torch.dtype]) -> None:
    weight = of_codes(40, 160, 32, "uint4", True)
    whole = weight.dequantised()
    for start, stop, group_size in ((48, 160, 16), (56, 96, 8), (0, 80, 32), (4, 64, 4), (32, 100, 32)):
        part = weight.columns(start, stop)
        assert part.group_size == group_size and torch.equal(part.dequantised(), whole[:, start:stop])
    check(native, weight.columns(48, 160), 5, has_bias=True)
    check(native, weight.columns(56, 96), 30, has_bias=False)


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_a_step_as_one_program_computes_what_the_calls_compute(build: Build) -> None:
    dtype, kernels = build[0], load_build(build)
    own = quantised(kernels, dtype, build[1])
    assert kernels.step is not None
    generator = torch.Generator().manual_seed(2)
    table, bias = torch.randn(30, 64, generator=generator).to(dtype), torch.randn(72, generator=generator).to(dtype)
    first, second = pack(own, of_bytes(72, 64)), pack(own, of_codes(72, 64, 32, "uint4", True))
    third, fourth = pack(own, of_codes(64, 72, 72, "float4", False)), pack(own, of_bytes(40, 72))
    operations = (
        *(Embed(0, table, 1.0), Linear(0, 1, first, bias), Linear(0, 2, second, bias)),
        *(Linear(1, 3, third, None), Linear(2, 4, fourth, None)),
    )
    tokens = torch.randint(0, 30, (11,), generator=generator)
    rows = torch.zeros(11, dtype=torch.int64)
    batch = AttentionBatch((0, 11), (11,), rows[:1].int(), rows[:1], 1, rows, rows, rows)
    x = table[tokens]
    expected = {
        3: own.linear(own.linear(x, first, bias), third, None),
        4: own.linear(own.linear(x, second, bias), fourth, None),
    }
    for output, right in expected.items():
        program = Program((64, 72, 72, 64, 40), operations, output)
        step = kernels.step.prepare(program, torch.zeros(1, 1, 64, dtype=dtype))
        assert torch.equal(step.run(tokens, batch, None), right)


def test_a_weight_larger_than_what_is_taken_at_once(
    native: tuple[Kernels, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_linear, "_CHUNK_BYTES", 64)
    check(native, of_bytes(70, 130), 3, has_bias=True)
    check(native, of_codes(70, 136, 8, "uint4", True), 3, has_bias=True)
