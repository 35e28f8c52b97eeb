"""Native linears against torch's, compiled for this CPU and for CPUs with fewer instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from motet.kernels.backend import native_kernels
from motet.kernels.huge_pages import huge_page_bytes
from motet.kernels.native import linear as native_linear
from motet.kernels.native import onednn_linear
from motet.kernels.native.build import NativeUnavailable, load_library
from motet.kernels.native.linear import NativeLinear, PackedWeight
from motet.kernels.plain.experts import PlainExperts
from motet.tests.rigs.native_builds import BUILDS, EXAMPLES, HERE, SANITIZERS, Build, close, load_build
from motet.tests.rigs.patience import PATIENCE_S


def draw(
    num_rows: int, num_in: int, num_out: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator) / max(1, num_in) ** 0.5
    return x.to(dtype), weight.to(dtype), torch.randn(num_out, generator=generator).to(dtype)


def load(build: Build) -> NativeLinear:
    try:
        return NativeLinear(load_library(flags=[*build[2], *SANITIZERS]), build[0], build[1])
    except NativeUnavailable as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module", params=BUILDS, ids=str)
def native(request: pytest.FixtureRequest) -> tuple[NativeLinear, torch.dtype]:
    """The native linears of each build, even where oneDNN would be chosen."""
    load_build(request.param)  # skips where the build cannot be made
    return load(request.param), request.param[0]


def pack(kernels: NativeLinear, weight: torch.Tensor) -> PackedWeight:
    """The packed weight in memory of its own, so that a sanitizer finds reads beyond its end."""
    packed = kernels.pack(weight)
    return replace(packed, panels=packed.panels.clone())


def check(native: tuple[NativeLinear, torch.dtype], num_rows: int, num_in: int, num_out: int, has_bias: bool) -> None:
    """Compares with torch. NaN surrounds the columns of x."""
    kernels, dtype = native
    x, weight, bias = draw(num_rows, num_in, num_out, dtype, seed=num_rows)
    wide = torch.full((num_rows, num_in + 37), float("nan"), dtype=dtype)
    wide[:, 5 : 5 + num_in] = x
    actual = kernels.linear(wide[:, 5 : 5 + num_in], pack(kernels, weight), bias if has_bias else None)
    assert actual.shape == (num_rows, num_out) and actual.dtype == dtype
    close(actual, linear(x, weight, bias if has_bias else None))


@settings(deadline=None, max_examples=2 * EXAMPLES)
@given(
    num_rows=st.integers(0, 60),
    num_in=st.one_of(st.integers(1, 70), st.sampled_from([576, 1537])),
    num_out=st.one_of(st.integers(1, 200), st.sampled_from([960, 1000])),
    has_bias=st.booleans(),
)
def test_linear(
    native: tuple[NativeLinear, torch.dtype], num_rows: int, num_in: int, num_out: int, has_bias: bool
) -> None:
    """Any number of inputs, odd ones too, and of outputs, whether they fill panels or not."""
    check(native, num_rows, num_in, num_out, has_bias)


@pytest.mark.parametrize("num_rows", [*range(14), 23, 24, 25, 47, 48, 49, 191, 192, 193, 230])
def test_every_number_of_rows(native: tuple[NativeLinear, torch.dtype], num_rows: int) -> None:
    """Every number of rows after the last full tile, and the ends of blocks."""
    check(native, num_rows, 64, 80, has_bias=True)


def test_wide_inputs(native: tuple[NativeLinear, torch.dtype]) -> None:
    """Inputs so wide that a block has the fewest rows."""
    for num_rows in (1, 25, 70):
        check(native, num_rows, 8192, 48, has_bias=False)


def test_nothing_in_and_nothing_out(native: tuple[NativeLinear, torch.dtype]) -> None:
    kernels, dtype = native
    x, weight, bias = draw(3, 0, 5, dtype, seed=0)
    torch.testing.assert_close(kernels.linear(x, pack(kernels, weight), bias), bias.expand(3, 5))
    x, weight, _ = draw(3, 8, 0, dtype, seed=0)
    assert kernels.linear(x, pack(kernels, weight), None).shape == (3, 0)


def test_rows_that_are_not_contiguous(native: tuple[NativeLinear, torch.dtype]) -> None:
    kernels, dtype = native
    x, weight, bias = draw(64, 96, 40, dtype, seed=0)
    columns = x.t().contiguous().t()
    assert columns.stride(1) != 1
    assert torch.equal(
        kernels.linear(columns, pack(kernels, weight), bias), kernels.linear(x, pack(kernels, weight), bias)
    )
    every_other = torch.randn(80, dtype=torch.float32).to(dtype)[::2]
    close(kernels.linear(x, pack(kernels, weight), every_other), linear(x, weight, every_other))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_out", [16, 80, 1000])
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_a_row_is_the_same_to_the_last_bit_with_any_others_and_on_any_threads(
    build: Build, num_out: int, num_threads: int
) -> None:
    dtype, _, flags = build
    kernels, one = (load((dtype, threads, flags)) for threads in (num_threads, 1))
    x, weight, bias = draw(230, 577, num_out, dtype, seed=0)
    packed = one.pack(weight)
    expected = torch.cat([one.linear(row, packed, bias) for row in x.split(1)])
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 64, 193, 230):
        assert torch.equal(kernels.linear(x[:num_rows], packed, bias), expected[:num_rows])


def test_results_in_float32_are_those_that_are_rounded(native: tuple[NativeLinear, torch.dtype]) -> None:
    """For logits."""
    kernels, dtype = native
    for num_rows in (0, 1, 33):
        x, weight, _ = draw(num_rows, 96, 1000, dtype, seed=num_rows)
        packed = pack(kernels, weight)
        found = kernels.to_floats(x, packed)
        assert found.dtype == torch.float32
        assert torch.equal(found, kernels.linear(x, packed, None).float())


def test_weights_lie_side_by_side(native: tuple[NativeLinear, torch.dtype]) -> None:
    """Small weights share huge pages."""
    kernels, dtype = native
    weights = [kernels.pack(draw(0, 64, 64, dtype, seed=i)[1]) for i in range(3)]
    starts = [weight.panels.data_ptr() for weight in weights]
    assert [b - a for a, b in pairwise(starts)] == [64 * 64 * dtype.itemsize] * 2


def test_memory_in_huge_pages_is_counted(tmp_path: Path) -> None:
    """Of what was asked to be in huge pages: other memory does not count."""
    smaps = tmp_path / "smaps"
    sizes = "7f00-7f80 rw-p 0 00:00 0 \nSize: 9000 kB\nRss: {} kB\nAnonHugePages: {} kB\nVmFlags: rd wr mr {}\n"
    smaps.write_text(sizes.format(5000, 4096, "hg sd") + sizes.format(300, 0, "sd") + sizes.format(24, 0, "hg"))
    assert huge_page_bytes(smaps) == (5024 << 10, 4 << 20)
    assert huge_page_bytes(tmp_path / "none") is None


@pytest.mark.parametrize("is_best", [True, False])
def test_onednn_serves_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, is_best: bool) -> None:
    """oneDNN is chosen on CPUs with matrix instructions, for bfloat16 only."""
    if not onednn_linear.can_pack(torch.bfloat16):
        pytest.skip("oneDNN takes no packed weights on this CPU")
    monkeypatch.setattr(NativeLinear, "is_best", property(lambda _: is_best, lambda _self, _value: None), raising=False)
    library = load_library(flags=[*HERE, *SANITIZERS])
    kernels = native_kernels(torch.bfloat16, 1, library)
    rest = "page copies by torch" if is_best else "page copies, experts by torch; linear by oneDNN"
    assert kernels.choice == f"native; {rest}"
    for num_rows in (0, 1, 5, 64):
        x, weight, bias = draw(num_rows, 96, 40, torch.bfloat16, seed=0)
        close(kernels.linear(x, kernels.pack_linear(weight), bias), linear(x, weight, bias))
        experts = torch.stack((weight, -weight))
        groups = kernels.experts.group(torch.arange(num_rows)[:, None] % 2, torch.ones(num_rows, 1), 0, 2)
        found = kernels.experts.linear(x, kernels.pack_experts(experts), groups)
        close(found, PlainExperts().linear(x, experts, groups))
    assert native_kernels(torch.float32, 1, library).choice == "native; page copies by torch"


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_native_is_best(build: Build) -> None:
    """With matrix instructions, too, which Linux gives to a process that asks."""
    assert load(build).is_best


def test_a_weight_larger_than_what_is_taken_at_once(
    native: tuple[NativeLinear, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_linear, "_CHUNK_BYTES", 4096)
    _, dtype = native
    x, weight, bias = draw(3, 64, 80, dtype, seed=0)
    fresh = load((dtype, 1, HERE))
    close(fresh.linear(x, fresh.pack(weight), bias), linear(x, weight, bias))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's names of instruction sets")
def test_a_cpu_that_onednn_takes_no_bfloat16_on_is_no_obstacle() -> None:
    """A CPU with AVX2, as in laptops. A process of its own, because oneDNN reads its limit when it is loaded."""
    program = """
import torch
from motet.kernels.native import linear, onednn_linear
assert not onednn_linear.can_pack(torch.bfloat16)
try:
    onednn_linear.pack_linear(torch.ones(16, 16, dtype=torch.bfloat16))
except RuntimeError:
    print("refused")
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "refused\n", done.stderr
