"""Norms, linears of eight bits, activations, grouped expert products and page copies.

Checked against float64, and timed against floors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from motet.benchmarks.gpu.machine import Machine, Row, relative_error
from motet.kernels.backend import Kernels, with_float8_weights
from motet.kernels.norms import ACTIVATIONS
from motet.kernels.plain.float8 import PlainFloat8

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def time_norm(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """x + residual and its norm."""
    for rows, width in ((64, 4096), (2048, 4096)) if not machine.is_dry else ((3, 70),):
        x, residual = (torch.randn(rows, width, dtype=machine.dtype, device=machine.device) for _ in range(2))
        weight = torch.rand(width, dtype=machine.dtype, device=machine.device) + 0.5
        normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
        exact = (x + residual).double()
        reference = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        error = max(relative_error(normed, reference), relative_error(total, exact))
        time_s = machine.time_s([lambda x=x, r=residual, w=weight: kernels.add_rms_norm(x, r, w, 1e-5)] * 4)  # type: ignore[misc]
        others = {}
        other_s = machine.time_s(
            [lambda x=x, r=residual, w=weight: torch.nn.functional.rms_norm(x + r, (w.numel(),), w, 1e-5)] * 4  # type: ignore[misc]
        )
        if other_s is not None:
            others["torch"] = other_s
        floor_s = machine.floor_s(4 * x.numel() * x.element_size())
        yield Row("add + norm", f"{rows} rows of {width}", error, TOLERANCE[machine.dtype], time_s, floor_s, others)


def time_float8(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Llama-3-8B's down projection with weights of eight bits: the bits of quantised rows, then the product."""
    if not machine.is_dry and torch.cuda.get_device_capability(machine.device)[0] < 9:
        return
    float8, twin = with_float8_weights(kernels).float8, PlainFloat8()
    assert float8 is not None
    num_in, num_out = (14336, 4096) if not machine.is_dry else (96, 64)
    weight = torch.randn(num_out, num_in, dtype=machine.dtype, device=machine.device) * num_in**-0.5
    packed = [float8.pack(weight) for _ in range(4)]  # each in memory of its own
    for rows in (1, 64, 2048) if not machine.is_dry else (3,):
        x = torch.randn(rows, num_in, dtype=machine.dtype, device=machine.device)
        (values, scales), (expected, expected_scales) = float8.quantise(x), twin.quantise(x)
        different = (values.view(torch.uint8) != expected.view(torch.uint8)).sum() + (scales != expected_scales).sum()
        time_s = machine.time_s([lambda x=x: float8.quantise(x)] * 4)  # type: ignore[misc]
        floor_s = machine.floor_s(x.numel() * (x.element_size() + 1))
        yield Row("float8 rows, bits", f"{rows} rows of {num_in}", float(different), 0.0, time_s, floor_s)
        reference = (expected.double() * expected_scales) @ (packed[0].values.double() * packed[0].scales).t()
        error = relative_error(float8.linear(x, packed[0], None), reference)
        time_s = machine.time_s([lambda x=x, w=w: float8.linear(x, w, None) for w in packed])  # type: ignore[misc]
        floor_s = machine.floor_s(weight.numel() + (num_in + num_out) * rows * x.element_size())
        others = {}
        other_s = machine.time_s([lambda x=x: kernels.linear(x, weight, None)] * 4)  # type: ignore[misc]
        if other_s is not None:
            others[f"linear, {machine.dtype}".replace("torch.", "")] = other_s
        what = f"{rows} rows, {num_in} to {num_out}"
        yield Row("float8 linear", what, error, TOLERANCE[machine.dtype], time_s, floor_s, others)


def time_activations(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Each activation of the gate times up."""
    rows, width = (64, 14336) if not machine.is_dry else (3, 70)
    gate_up = torch.randn(rows, 2 * width, dtype=machine.dtype, device=machine.device) * 3
    gate, up = gate_up.double().chunk(2, -1)
    for name, activation in ACTIVATIONS.items():
        error = relative_error(kernels.gated(gate_up, name), activation(gate) * up)
        time_s = machine.time_s([lambda name=name: kernels.gated(gate_up, name)] * 4)  # type: ignore[misc]
        floor_s = machine.floor_s(3 * rows * width * gate_up.element_size())
        yield Row(f"{name} · up", f"{rows} rows of {width}", error, TOLERANCE[machine.dtype], time_s, floor_s)


def time_experts(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """Mixtral-8x7B's gate and up: eight experts, two for each row."""
    hidden, wide, num_experts = (4096, 28672, 8) if not machine.is_dry else (64, 96, 3)
    weight = torch.randn(num_experts, wide, hidden, dtype=machine.dtype, device=machine.device) * hidden**-0.5
    for rows in (64, 2048) if not machine.is_dry else (5,):
        chosen = torch.rand(rows, num_experts, device=machine.device).topk(2).indices
        shares = torch.full((rows, 2), 0.5, device=machine.device)
        groups = kernels.experts.group(chosen, shares, 0, num_experts)
        x = torch.randn(2 * rows, hidden, dtype=machine.dtype, device=machine.device)
        out = kernels.experts.linear(x, weight, groups)
        bounds = groups.offsets.tolist()
        errors = [
            relative_error(out[start:end][:64], x[start:end][:64].double() @ weight[expert].double().t())
            for expert, (start, end) in enumerate(itertools.pairwise(bounds))
            if end > start
        ]
        time_s = machine.time_s([lambda x=x, groups=groups: kernels.experts.linear(x, weight, groups)] * 2)  # type: ignore[misc]
        num_bytes = (weight.numel() + x.numel() + out.numel()) * x.element_size()
        floor_s = machine.floor_s(num_bytes, 2 * 2 * rows * hidden * wide)
        what = f"{rows} rows, 2 of {num_experts} experts"
        yield Row("grouped experts", what, max(errors), TOLERANCE[machine.dtype], time_s, floor_s)


def time_page_copies(machine: Machine, kernels: Kernels) -> Iterator[Row]:
    """An adapter of 40 pages of 2 MiB from pinned memory, as a loader brings it. No floor: the bus is not measured."""
    count, layers, slab = (40, 32, 32768) if not machine.is_dry else (3, 2, 64)
    pool = torch.zeros(2 * count, layers, slab, dtype=machine.dtype, device=machine.device)
    content = torch.randn(count, layers, slab, dtype=machine.dtype)
    content = content if machine.is_dry else content.pin_memory()
    pages = torch.randperm(2 * count)[:count].tolist()
    kernels.write_pages(pool, pages, content)
    error = relative_error(pool[torch.tensor(pages)].cpu(), content)
    time_s = machine.eager_time_s(lambda: kernels.write_pages(pool, pages, content))
    note = "" if time_s is None else f"{content.nbytes / time_s / 1e9:.0f} GB/s"
    yield Row("page copies", f"{count} pages from the host", error, 0.0, time_s, None, note=note)
