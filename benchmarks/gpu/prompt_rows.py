"""Steps that compute prompts beside decodes, of Llama-3-8B's shape: the floor, and what the profiler saw."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from motet.benchmarks.gpu.engine_bench import DRY_SIZE, FULL_SIZE, RANK, Bench
from motet.benchmarks.gpu.machine import Machine, Row
from motet.benchmarks.gpu.roofline import component_of
from motet.benchmarks.gpu.step_profile import StepProfile
from motet.kernels.backend import Kernels, choose_kernels
from motet.workers.costs.operations import Chunk, StepBatch, step_operations
from motet.workers.execution.runner import Runner

_PROMPT, _SEQUENCES = 512, 128
_BEFORE, _WATCHED = 12, 8  # steps
Record = dict[str, Any]


def time_prompts(machine: Machine, kernels: Kernels | None) -> Iterator[Record]:
    """Prompts of 512 tokens in full steps, a few dozen decodes beside them; on the base, 16 and 64 adapters."""
    size = replace(FULL_SIZE, num_sequences=_SEQUENCES, context=_PROMPT, num_steps=60, adapters=(0, 16, 64))
    before, watched = _BEFORE, _WATCHED
    if machine.is_dry:
        size, before, watched = replace(DRY_SIZE, num_sequences=8, context=40, num_steps=12), 1, 2
    bench = Bench(machine, size, kernels or choose_kernels(machine.device, machine.dtype, 1))
    launches = _timed_launches(bench.runner)
    for num_adapters in size.adapters:
        profile = StepProfile(before, watched, on_gpu=not machine.is_dry)
        bench.bring_adapters(num_adapters)
        bench.serve(num_adapters, on_prompts=profile)
        launches.clear()
        step_s = statistics.median(bench.serve(num_adapters).prompts_s[before : before + watched])
        host_s, host_cpu_s = map(statistics.median, zip(*launches[before : before + watched], strict=True))
        num_decodes = (before + watched // 2) * size.max_tokens // size.context
        num_chunks = (size.max_tokens - num_decodes) // size.context
        batch = StepBatch((size.context,) * num_decodes, (Chunk(0, size.context),) * num_chunks, num_adapters, RANK)
        operations = step_operations(bench.model, batch)
        limits = machine.limits
        floor_s = None if limits is None else sum(operation.seconds(limits) for operation in operations)
        taken = defaultdict[str, float](float)
        for kernel in profile.kernels():
            taken[component_of(kernel.name)] += kernel.seconds
        taken |= {"the host's launches": host_s, "their CPU time": host_cpu_s}
        note = ", ".join(f"{what} {seconds * 1e3:.2f} ms" for what, seconds in taken.items())
        case = f"{size.max_tokens} rows, {num_adapters} adapters"
        yield Row("a step", case, time_s=None if machine.is_dry else step_s, floor_s=floor_s, note=note).record
        for kernel in profile.kernels()[:12]:
            value = f"{kernel.launches:.0f} launches, {kernel.seconds * 1e3:.2f} ms"
            yield {"kind": "fact", "name": f"{case}: {kernel.name[:80]}", "value": value}
    bench.engine.close()


def _timed_launches(runner: Runner) -> list[tuple[float, float]]:
    """To which each further step adds how long its launches took, and the CPU time of that."""
    times: list[tuple[float, float]] = []
    begin = runner.begin

    def timed(*arguments: Any, **named: Any) -> Any:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        try:
            return begin(*arguments, **named)
        finally:
            times.append((time.perf_counter() - began_s, time.thread_time() - began_cpu_s))

    runner.begin = timed  # type: ignore[method-assign]
    return times
