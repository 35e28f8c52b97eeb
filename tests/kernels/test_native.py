"""The native CPU kernels against their plain twins, compiled for this CPU and for CPUs with fewer instructions.

`tests/kernels/test_sanitizers.py` runs this file once more, with sanitizers compiled in.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import motet.kernels.gpu
from motet.kernels import norms
from motet.kernels.attention import AttentionBatch
from motet.kernels.backend import FastKernelsUnavailable, Kernels, choose_kernels
from motet.kernels.native.build import COMPILERS, NativeUnavailable, load_library
from motet.kernels.plain import attention as plain_attention
from motet.kernels.windows import AttentionChunk
from motet.tests.rigs.given_back import poison_before_window
from motet.tests.rigs.native_builds import DTYPES, EXAMPLES, HERE, TOLERANCE, close, load_build
from motet.workers.execution.device_rows import make_inputs
from motet.workers.models.rotary import rotary_table
from motet.workers.models.rotary_config import RotaryConfig
from motet.workers.plan import SequencePlan, StepPlan, packed

CPU = torch.device("cpu")
ACTIVATIONS: tuple[norms.Activation, ...] = (*norms.ACTIVATIONS, norms.ClampedSwiglu(1.7, 3.0))


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 15, 16, 17, 100, 300]), st.integers(1, 20)), min_size=1, max_size=6
    ),
    head_dim=st.sampled_from([16, 32, 64, 80, 96, 128, 256]),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    block_size=st.sampled_from([4, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 60), st.integers(1, 60).map(AttentionChunk)),
    softcap=st.one_of(st.none(), st.just(30.0)),
    seed=st.integers(0, 2**20),
)
def test_attention(
    native: tuple[Kernels, torch.dtype],
    sequences: list[tuple[int, int]],
    head_dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """Any number of old tokens and of new rows, in pages of random order; what no row may see is NaN."""
    check_attention(native, sequences, head_dim, group, num_kv_heads, block_size, window, softcap, seed)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_attention_of_each_shape(native: tuple[Kernels, torch.dtype], head_dim: int) -> None:
    """One token, page edges, and a prompt chunk after a context, for each number of heads that share K and V."""
    for group in range(1, 9):
        check_attention(native, [(0, 1), (15, 1), (16, 1), (14, 18)], head_dim, group, 1, 16, None, None, seed=group)


def test_attention_over_a_long_context(native: tuple[Kernels, torch.dtype]) -> None:
    for seed in (0, 1):
        check_attention(native, [(8191, 1), (8189, 3)], 64, 3, 1, 16, None, None, seed)
        check_attention(native, [(8191, 1)], 64, 3, 1, 16, 1000, None, seed)


def test_heads_too_wide_are_the_twins_and_one_line_says_so(
    native: tuple[Kernels, torch.dtype], caplog: pytest.LogCaptureFixture
) -> None:
    """For each limit, the largest value that is native and one above it."""

    def warnings() -> list[str]:  # of the kernels: a timer that an earlier test started may log now
        return [record.getMessage() for record in caplog.records if record.name.startswith("motet.kernels")]

    with caplog.at_level(logging.WARNING):
        check_attention(native, [(20, 1), (0, 3)], 576, 2, 1, 16, None, None, seed=0)
        check_attention(native, [(20, 1), (0, 3)], 16, 32, 1, 16, None, None, seed=0)
        check_attention(native, [(20, 1), (0, 3)], 16, 33, 1, 16, None, None, seed=1)  # one KV head: group by group
        assert not warnings()
        check_attention(native, [(20, 1), (0, 3)], 592, 2, 1, 16, None, None, seed=0)
        check_attention(native, [(20, 1), (0, 3)], 16, 33, 2, 16, None, None, seed=0)
    (warning,) = warnings()
    assert "heads of 592 in groups of 2" in warning


@pytest.mark.parametrize("num_heads", [4, 40])
def test_keys_that_are_values(native: tuple[Kernels, torch.dtype], num_heads: int) -> None:
    """As in latent attention: V is read where K is, and the last columns of k are written alone, rotated."""
    kernels, dtype = native
    generator = torch.Generator().manual_seed(num_heads)
    latents, width, rotated, block_size = 5, 40, 8, 4
    pool = torch.full((latents, 3, block_size, 1, width), torch.nan, dtype=dtype)
    kv = pool[:, 1].unsqueeze(1).expand(-1, 2, -1, -1, -1)
    plans = (
        SequencePlan(0, (0,) * 6, 0, packed((3, 1)), None, None),
        SequencePlan(1, (0,), 0, packed((4,)), None, None),
    )
    batch = make_inputs(StepPlan(1, plans, (), ()), {}, block_size, CPU).attention
    q, k = (torch.randn(7, heads, width, generator=generator).to(dtype) for heads in (num_heads, 1))
    rotary = rotary_table(RotaryConfig(10000.0, "default", {}), rotated, 8)
    place, part = slice(width - rotated, width), k[..., width - rotated :]
    pool[batch.row_pages, 1, batch.row_slots] = k
    turned = kernels.write_kv(q[..., place], part, part[:, :0], rotary, kv[..., place], batch)
    apart = pool[:, 1].unsqueeze(1).repeat(1, 2, 1, 1, 1)
    expected = plain_attention.write_kv(q[..., place], part, part, rotary, apart[..., place].clone(), batch)
    close(turned, expected)
    assert not kv[batch.row_pages, 0, batch.row_slots][1:, :, place].equal(part[1:]), "k is rotated"
    close(kernels.paged_attention(q, kv, batch, 0.2, None), plain_attention.paged_attention(q, apart, batch, 0.2, None))
    assert pool[:, ::2].isnan().all(), "another layer was written"


def test_attention_of_nothing(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, dtype = native
    rows = torch.zeros(0, dtype=torch.int64)
    batch = AttentionBatch((0,), (), rows.int(), rows, 0, rows, rows, rows)
    q, k = torch.zeros(0, 6, 64, dtype=dtype), torch.zeros(0, 2, 64, dtype=dtype)
    kv = torch.full((3, 2, 16, 2, 64), torch.nan, dtype=dtype)
    rotary = rotary_table(RotaryConfig(10000.0, "default", {}), 64, 8)
    assert kernels.write_kv(q, k, k, rotary, kv, batch).shape == (0, 6, 64)
    assert kernels.paged_attention(q, kv, batch, 0.125, None, None).shape == (0, 6, 64)
    assert kv.isnan().all()


def check_attention(
    native: tuple[Kernels, torch.dtype],
    sequences: list[tuple[int, int]],
    head_dim: int,
    group: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    """`sequences`: (old tokens, new rows) of each."""
    kernels, dtype = native
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-(old + new) // block_size) for old, new in sequences) + 3
    free = torch.randperm(num_pages, generator=generator).tolist()
    # Two layers in a pool, as the engine has them: a layer's pages are strided.
    pool = torch.full((num_pages, 2, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    plans = []
    for i, (old, new) in enumerate(sequences):
        pages = tuple(free.pop() for _ in range(-(-(old + new) // block_size)))
        plans.append(SequencePlan(i, (0,) * new, old, packed(pages), None, None))
        at = torch.arange(old)
        content = torch.randn(old, 2, num_kv_heads, head_dim, generator=generator).to(dtype)
        pool[torch.tensor(pages)[at // block_size], 1, :, at % block_size] = content
    batch = make_inputs(StepPlan(1, tuple(plans), (), ()), {}, block_size, CPU).attention
    num_rows = batch.query_starts[-1]
    # One tensor of heads side by side, as a layer's linear gives them: q, k and v are strided.
    heads = torch.randn(num_rows, num_kv_heads * (group + 2), head_dim, generator=generator).to(dtype)
    q, k, v = heads.split([num_kv_heads * group, num_kv_heads, num_kv_heads], dim=1)
    scaled = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16.0}  # queries, by their position
    config = RotaryConfig(10000.0, "default", scaled if seed % 2 else {})
    rotary = rotary_table(config, head_dim, max(old + new for old, new in sequences))
    kv, twin_kv = pool[:, 1], pool.clone()[:, 1]
    turned = kernels.write_kv(q, k, v, rotary, kv, batch)
    expected_turned = plain_attention.write_kv(q, k, v, rotary, twin_kv, batch)
    close(turned, expected_turned)
    torch.testing.assert_close(kv, twin_kv, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)
    poison_before_window(twin_kv, batch, window)
    sinks = torch.randn(q.shape[1], generator=generator) * 9 if seed % 2 else None
    if sinks is not None and len(sinks) > 2:
        sinks[0] = 200.0  # nothing is left of the values
    how = (head_dim**-0.5, window, softcap, sinks)
    actual = kernels.paged_attention(expected_turned, twin_kv, batch, *how)
    close(actual, plain_attention.paged_attention(expected_turned, twin_kv, batch, *how))
    assert pool[:, 0].isnan().all(), "another layer was written"


@settings(deadline=None, max_examples=EXAMPLES)
@given(
    rows=st.integers(0, 9),
    width=st.integers(1, 200),
    has_residual=st.booleans(),
    has_wide_weight=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_rows(
    native: tuple[Kernels, torch.dtype], rows: int, width: int, has_residual: bool, has_wide_weight: bool, seed: int
) -> None:
    """Rows with a stride and NaN between them; the weight of a norm in the rows' dtype, or in float32 (Gemma)."""
    kernels, dtype = native
    generator = torch.Generator().manual_seed(seed)
    x, gate_up = (
        torch.full((rows, columns + 3), torch.nan, dtype=dtype)[:, :columns] for columns in (width, 2 * width)
    )
    x.copy_(torch.randn(x.shape, generator=generator))
    gate_up.copy_(torch.randn(gate_up.shape, generator=generator) * 4)
    residual = torch.randn(rows, width, generator=generator).to(dtype) if has_residual else None
    weight = torch.randn(width, generator=generator)
    weight = weight if has_wide_weight else weight.to(dtype)
    for actual, expected in zip(
        kernels.add_rms_norm(x, residual, weight, 1e-5), norms.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        close(actual, expected)
    close(kernels.rms_norm(x, weight, 1e-5), norms.rms_norm(x, weight, 1e-5))
    x += 3.0
    for actual, expected in zip(
        kernels.add_layer_norm(x, residual, weight, 1e-5), norms.add_layer_norm(x, residual, weight, 1e-5), strict=True
    ):
        close(actual, expected)
    for activation in ACTIVATIONS:
        close(kernels.gated(gate_up, activation), norms.gated(gate_up, activation))


def test_a_weight_in_float32_is_multiplied_before_rounding(native: tuple[Kernels, torch.dtype]) -> None:
    """There is a single rounding, with an error of at most half of the last bit; two roundings could double that."""
    kernels, dtype = native
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 100, generator=generator).to(dtype), torch.randn(100, generator=generator)
    wide = x.double()
    expected = weight * wide / wide.square().mean(-1, keepdim=True).sqrt()
    half_a_bit = {torch.float32: 1e-6, torch.bfloat16: 1.01 * 2**-8}[dtype]
    for kernel in (kernels.rms_norm, norms.rms_norm):
        assert ((kernel(x, weight, 0.0).double() - expected) / expected).abs().max() <= half_a_bit


def test_rounded_where_the_twin_rounds(native: tuple[Kernels, torch.dtype]) -> None:
    """A norm is rounded before its weight, an activation before its product. Elsewhere, the last bit would differ."""
    kernels, dtype = native
    weight = (1 + torch.arange(128) / 128).to(dtype)
    x = torch.full((1, 128), 2.0).to(dtype)
    x[:, ::4] = 0  # a mean square of 3
    gate_up = torch.cat((torch.full((1, 128), 1.5).to(dtype), weight[None]), 1)
    pairs = [
        (kernels.rms_norm(x, weight, 0.0), norms.rms_norm(x, weight, 0.0)),
        *((kernels.gated(gate_up, each), norms.gated(gate_up, each)) for each in norms.ACTIVATIONS),
    ]
    for actual, expected in pairs:
        if dtype == torch.bfloat16:
            assert torch.equal(actual, expected)
        else:
            torch.testing.assert_close(actual, expected)


def test_nan_stays_nan(native: tuple[Kernels, torch.dtype]) -> None:
    """NaN with any payload stays NaN. If it were rounded like a number, 0x7fffffff would become -0."""
    kernels, dtype = native
    weight = torch.ones(20)
    weight.view(torch.int32)[3] = 0x7FFFFFFF
    assert kernels.rms_norm(torch.ones(2, 20, dtype=dtype), weight, 1e-5)[:, 3].isnan().all()


@pytest.mark.parametrize("best", [*range(16), 16, 31, 32, 47, 48, 62, 63, 64, 79])
def test_scores_far_apart(native: tuple[Kernels, torch.dtype], best: int) -> None:
    """One key scores far above the others: in every lane of a tile, and in every tile."""
    kernels, dtype = native
    kv = torch.zeros(5, 2, 16, 1, 16, dtype=dtype)
    kv[:, 1, :, 0] = torch.arange(80.0).to(dtype).view(5, 16, 1)
    for key, score in ((best, 300.0), ((best + 1) % 80, 200.0)):
        kv[key // 16, 0, key % 16, 0, 0] = score
    q = torch.zeros(1, 1, 16, dtype=dtype)
    q[..., 0] = 1.0
    plan = SequencePlan(0, (0,), 79, packed(range(5)), None, None)
    batch = make_inputs(StepPlan(1, (plan,), (), ()), {}, 16, CPU).attention
    close(kernels.paged_attention(q, kv, batch, 1.0, None, None), torch.full((1, 1, 16), float(best), dtype=dtype))


@pytest.mark.parametrize("old", [0, 50, 63, 64, 130])
def test_a_row_attends_the_same_to_the_last_bit_alone_and_in_a_chunk(
    native: tuple[Kernels, torch.dtype], old: int
) -> None:
    """The kernel adds up values differently for few queries and for many; results must be equal to the last bit."""
    kernels, dtype = native
    generator, new, dim = torch.Generator().manual_seed(old), 37, 80
    pages = tuple(torch.randperm(-(-(old + new) // 16), generator=generator).tolist())
    kv = torch.randn(len(pages), 2, 16, 2, dim, generator=generator).to(dtype)
    q = torch.randn(new, 6, dim, generator=generator).to(dtype)

    def attend(start: int, end: int) -> torch.Tensor:
        plan = SequencePlan(0, (0,) * (end - start), old + start, packed(pages), None, None)
        batch = make_inputs(StepPlan(1, (plan,), (), ()), {}, 16, CPU).attention
        return kernels.paged_attention(q[start:end], kv, batch, dim**-0.5, None, None)

    whole = attend(0, new)
    for start, end in ((0, 1), (1, 4), (4, 30), (30, 37), (36, 37)):
        assert torch.equal(attend(start, end), whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_rows(dtype: torch.dtype) -> None:
    """There are enough rows that threads share them; the result is the same to the last bit."""
    one, two = (load_build((dtype, num_threads, HERE)) for num_threads in (1, 2))
    generator = torch.Generator().manual_seed(0)
    x, gate_up = (torch.randn(61, width, generator=generator).to(dtype) for width in (577, 1154))
    weight = torch.randn(577, generator=generator).to(dtype)
    calls: list[Callable[[Kernels], torch.Tensor]] = [
        lambda k: k.rms_norm(x, weight, 1e-5),
        *(lambda k, each=each: k.gated(gate_up, each) for each in ACTIVATIONS),
    ]
    for kernels in calls:
        assert torch.equal(kernels(one), kernels(two))
    for of_one, of_two in zip(*(k.add_rms_norm(x, x, weight, 1e-5) for k in (one, two)), strict=True):
        assert torch.equal(of_one, of_two)
    for kernels_of_build in (one, two):
        check_attention((kernels_of_build, dtype), [(20, 40), (0, 37)], 64, 4, 2, 16, None, None, seed=0)


def test_without_a_compiler_the_twins_serve_and_one_line_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        kernels = choose_kernels(CPU, torch.bfloat16, 1)
    assert kernels.name == "torch"
    assert len(caplog.records) == 1
    assert "no C++ compiler was found" in caplog.text


def test_slow_kernels_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FastKernelsUnavailable, match=r"none is faster for torch\.float16 on cpu"):
        choose_kernels(CPU, torch.float16, 1, allow_plain=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FastKernelsUnavailable, match=r"no C\+\+ compiler was found"):
        choose_kernels(CPU, torch.bfloat16, 1, allow_plain=False)


def test_other_numbers_are_the_twins_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(CPU, torch.float16, 1).choice == "torch"
    assert [record.getMessage().split(":")[-1].strip() for record in caplog.records] == [
        "none is faster for torch.float16 on cpu"
    ]


def test_without_triton_the_twins_serve_a_gpu_and_one_line_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.delattr(motet.kernels.gpu, "rows", raising=False)
    monkeypatch.setitem(sys.modules, "motet.kernels.gpu.rows", None)
    with caplog.at_level(logging.WARNING):
        assert choose_kernels(torch.device("cuda"), torch.bfloat16, 1).choice == "torch"
    assert len(caplog.records) == 1
    assert "Triton cannot be imported" in caplog.text


def test_each_operations_choice_is_reported(native: tuple[Kernels, torch.dtype]) -> None:
    kernels, _ = native
    assert kernels.choice.startswith("native; ") and "page copies" in kernels.choice


def test_a_library_is_compiled_once_and_a_failing_compiler_leaves_nothing(tmp_path: Path) -> None:
    real = next((name for name in COMPILERS if shutil.which(name)), None)
    if real is None:
        pytest.skip("no compiler")
    counting, calls = tmp_path / "counting-c++", tmp_path / "calls"
    counting.write_text(f'#!/bin/sh\necho one >> "{calls}"\nexec {real} "$@" -O0\n')
    counting.chmod(0o755)
    cache = tmp_path / "cache"
    reported: list[tuple[int, int]] = []

    def load() -> None:
        load_library(cache, compilers=[str(counting)], on_compile=lambda *event: reported.append(event))

    with ThreadPoolExecutor(3) as workers:  # they start together
        list(workers.map(lambda _: load(), range(3)))
    (built,) = cache.iterdir()
    assert built.suffix == ".so"
    assert sorted(reported) == [(0, 1)] * 3 + [(1, 1)] * 3  # who waits for another's compilation says so, too
    load()
    assert len(reported) == 6
    assert calls.read_text() == "one\n"
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'fatal error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(NativeUnavailable, match="no such thing"):
        load_library(cache=tmp_path / "other", compilers=[str(broken)])
    assert not list((tmp_path / "other").glob("*.so"))
