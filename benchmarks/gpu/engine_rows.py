"""The whole engine: right on a tiny model in float32, and timed on Llama-3-8B's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from motet.benchmarks.gpu.engine_bench import CHECK_SIZE, DRY_SIZE, FULL_SIZE, Bench
from motet.benchmarks.gpu.machine import Machine, Row, relative_error
from motet.kernels.backend import choose_kernels, plain_kernels, triton_kernels

_TOLERANCE = 1e-3  # of log-probabilities in float32


def check_engine(machine: Machine) -> Iterator[Row]:
    """Checks greedy tokens and their log-probabilities, with decodes in CUDA graphs, against the plain twins."""
    exact, size = replace(machine, dtype=torch.float32), DRY_SIZE if machine.is_dry else CHECK_SIZE
    fast, plain = (
        Bench(exact, size, kernels) for kernels in (triton_kernels(exact.device, exact.dtype), plain_kernels())
    )
    for num_adapters in size.adapters:
        ours, theirs = fast.serve(num_adapters), plain.serve(num_adapters)
        error = relative_error(ours.logprobs, theirs.logprobs)
        if ours.token_ids != theirs.token_ids:
            error = float("nan")
        what = f"tokens of {size.num_sequences} sequences, {num_adapters} adapters"
        yield Row("engine", what, error, _TOLERANCE)
    fast.engine.close()
    plain.engine.close()


def time_engine(machine: Machine) -> Iterator[Row]:
    """Times a decode step of all sequences: on the base, on 1, 8 and 64 adapters. Random weights. Dry: not timed."""
    device, dtype = machine.device, machine.dtype
    size = DRY_SIZE if machine.is_dry else FULL_SIZE
    kernels = triton_kernels(device, dtype) if machine.is_dry else choose_kernels(device, dtype, 1)
    bench, base_s = Bench(machine, size, kernels), None
    for num_adapters in size.adapters:
        step_s = bench.serve(num_adapters).step_s
        base_s = step_s if base_s is None else base_s
        what = f"B {size.num_sequences}, context {size.context}, {num_adapters} adapters"
        floor_s = None if machine.limits is None else bench.floor(num_adapters, machine.limits).seconds
        speed = f"{size.num_sequences / step_s:.0f} tokens/s, {base_s / step_s:.2f} of the base's"
        note = kernels.choice if machine.is_dry else f"{speed} ({kernels.choice})"
        yield Row("engine decode step", what, None, None, None if machine.is_dry else step_s, floor_s, note=note)
    bench.engine.close()
