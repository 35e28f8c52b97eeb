"""The floor of a decode step: the issue's arithmetic, by hand, and that the measured lines leave nothing out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from motet.benchmarks.gpu.decode_rows import QWEN3_5_9B
from motet.benchmarks.gpu.engine_bench import FULL_SIZE, model_of
from motet.benchmarks.gpu.roofline import (
    OTHER_KERNELS,
    DecodeStep,
    KernelTime,
    component_of,
    explained,
    num_launches,
    roofline,
    table,
)
from motet.workers.costs.devices import DEVICES

LLAMA = model_of(FULL_SIZE)
H100 = DEVICES["H100 SXM"]
STEP = DecodeStep((1024,) * 64, num_adapters=64, rank=16)


def test_llama_3_8b_at_batch_64_takes_at_least_8_6_ms_on_an_h100() -> None:
    """Without launches; with the 580 of them, at a microsecond each, 9.2."""
    floor = roofline(LLAMA, STEP, H100)
    weights, kv, adapters, launches = floor.components
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert weights.num_bytes == 2 * (32 * layer + 128256 * 4096)
    assert kv.num_bytes == 64 * 1024 * 131072  # a token's KV takes 128 KiB
    sides = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 14336)
    assert adapters.num_bytes == 2 * 64 * 32 * 16 * sides
    assert floor.seconds - launches.floor_s == pytest.approx(8.6e-3, abs=0.05e-3)
    assert launches.floor_s == pytest.approx((32 * 18 + 4) * 1e-6)
    assert floor.num_bytes == weights.num_bytes + kv.num_bytes + adapters.num_bytes


def test_weights_of_eight_bits_halve_what_layers_read() -> None:
    weights, *rest = roofline(LLAMA, replace(STEP, weights_in_float8=True), H100).components
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    outputs = 4096 + 1024 + 1024 + 4096 + 2 * 14336 + 4096
    assert weights.num_bytes == 32 * (layer + 4 * outputs) + 2 * 128256 * 4096
    assert [part.num_bytes for part in rest] == [part.num_bytes for part in roofline(LLAMA, STEP, H100).components[1:]]
    assert rest[-1].floor_s == pytest.approx((32 * 22 + 4) * 1e-6)
    many = roofline(LLAMA, DecodeStep((10,) * 1024, weights_in_float8=True), H100).components[0]
    assert many.floor_s == pytest.approx(2 * 1024 * (32 * layer / 2 + 128256 * 4096) / 989e12)


def test_kv_of_eight_bits_is_read_with_its_scales() -> None:
    found, plain = (roofline(LLAMA, replace(STEP, kv_in_float8=is_so), H100).components for is_so in (True, False))
    assert found[1].num_bytes == 64 * 1024 * 32 * 2 * 8 * (128 + 4)
    assert [found[at] for at in (0, 2, 3)] == [plain[at] for at in (0, 2, 3)]


def test_what_a_step_has_not_costs_nothing() -> None:
    weights, kv, adapters, launches = roofline(LLAMA, DecodeStep((1,)), H100).components
    assert adapters.num_bytes == 0
    assert kv.num_bytes == 131072
    assert launches.floor_s == pytest.approx(num_launches(LLAMA, adapters=False) * 1e-6)
    assert weights.floor_s == pytest.approx(weights.num_bytes / 3.35e12)


def test_states_are_read_and_written_once() -> None:
    """Of 24 of 32 layers, 32 heads of 128 columns and keys each, in float32."""
    floor = roofline(model_of(replace(FULL_SIZE, config=QWEN3_5_9B)), STEP, H100)
    weights, kv, _, _, states = floor.components
    assert states.num_bytes == 2 * 64 * 24 * 32 * 128 * 128 * 4
    assert kv.num_bytes == 64 * 1024 * 8 * 2 * 4 * 256 * 2
    inputs = 2 * 16 * 128 + 2 * 32 * 128 + 2 * 32  # q and k, v and z, b and a
    recurrent = 24 * 4096 * (inputs + 32 * 128)
    attention = 8 * 4096 * (3 * 16 * 256 + 2 * 4 * 256)  # q with its gate, o, k and v
    assert weights.num_bytes == 2 * (recurrent + attention + 32 * 3 * 4096 * 12288 + 248320 * 4096)


def test_windows_bound_what_is_read_of_the_kv() -> None:
    sliding = replace(LLAMA, sliding_windows=(256, None) * 16)
    assert roofline(sliding, STEP, H100).components[1].num_bytes == 64 * (256 + 1024) * 131072 // 2


def test_large_batches_are_bound_by_products() -> None:
    weights = roofline(LLAMA, DecodeStep((10,) * 1024), H100).components[0]
    assert weights.floor_s == pytest.approx(2 * 1024 * weights.num_bytes / 2 / 989e12)


@pytest.mark.parametrize(
    ("kernel", "component"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "weights"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "weights"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "weights"),
        ("quantise_kernel", "weights"),
        ("decode_kernel", "KV"),
        ("void flash::FlashAttnFwdSm90<...>", "KV"),
        ("shrink_kernel", "adapters"),
        ("recurrence_kernel", "states"),
        ("norm_kernel", OTHER_KERNELS),
        ("Memcpy DtoH (Device -> Pinned)", OTHER_KERNELS),
    ],
)
def test_kernels_belong_to_components(kernel: str, component: str) -> None:
    assert component_of(kernel) == component


def test_the_measured_lines_sum_up_to_the_step() -> None:
    kernels = [
        KernelTime("nvjet_tst_64x8", 129, 5e-3),
        KernelTime("decode_kernel", 32, 3e-3),
        KernelTime("combine_kernel", 32, 0.5e-3),
        KernelTime("expand_kernel", 128, 4e-3),
        KernelTime("norm_kernel", 65, 0.25e-3),
    ]
    floor = roofline(LLAMA, STEP, H100)
    lines = explained(floor, 14e-3, kernels)
    measured = {line.component: line.measured_s for line in lines}
    assert measured["KV"] == pytest.approx(3.5e-3)
    assert measured["launches"] == pytest.approx(1.25e-3)
    assert measured[OTHER_KERNELS] == pytest.approx(0.25e-3)
    assert sum(line.measured_s or 0.0 for line in lines) == pytest.approx(14e-3)
    assert sum(line.lost_s for line in lines) == pytest.approx(14e-3 - floor.seconds)
    assert "| adapters | 1.60 | 4.00 | 2.40 |" in table(lines, 14e-3)


def test_nothing_measured_shows_as_nothing() -> None:
    lines = explained(roofline(LLAMA, STEP, H100), None, ())
    assert {line.measured_s for line in lines} == {None}
    assert "| a step | 9.23 | – | – |" in table(lines)
