"""The parts of the first run on a GPU, in the order that finds most: each by itself, in a process of its own."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton

from motet.benchmarks.gpu.machine import Machine

Record = dict[str, Any]  # plain values with a "kind": fact, row, step, waits, sweep


@dataclass(frozen=True)
class Part:
    """`run` yields what it has found as it finds it; `limit_s` ends it."""

    name: str
    limit_s: float
    run: Callable[[], Iterator[Record]]


def parts(is_dry: bool) -> tuple[Part, ...]:
    """`is_dry`: on the stand-in GPU and in Triton's interpreter, with tiny shapes, without times and time limits."""
    found: list[tuple[str, float, Callable[[bool], Iterator[Record]]]] = [
        ("versions", 90.0, _versions),
        ("demo", 120.0, _demo),
        ("checks", 120.0, partial(_kernels, names=("check_attention", "check_lora", "check_recurrence"))),
        ("times", 120.0, partial(_kernels, names=_TIMED)),
        ("decode-1", 120.0, partial(_decodes, num_sequences=1)),
        ("decode-64", 180.0, partial(_decodes, num_sequences=64)),
        ("decode-256", 150.0, partial(_decodes, num_sequences=256)),
        ("decode-64-float8", 120.0, _float8_decodes),
        ("hybrid-64", 150.0, _hybrid_decodes),
        ("prompts", 150.0, _prompts),
        ("layers", 90.0, _layers),
        ("sweep", 180.0, _sweep),
        ("long", 120.0, _long),
    ]
    return tuple(Part(name, _DRY_LIMIT_S if is_dry else limit_s, partial(run, is_dry)) for name, limit_s, run in found)


_DRY_LIMIT_S = 3600.0

# Sections of `run.py` that are not checks alone.
_TIMED = (
    "time_decode",
    "time_chunks",
    "time_write_kv",
    "time_lora",
    "time_recurrence",
    "time_norm",
    "time_float8",
    "time_activations",
    "time_experts",
    "time_page_copies",
)


def _versions(is_dry: bool) -> Iterator[Record]:
    yield _fact("Python", platform.python_version())
    yield _fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    yield _fact("Triton", triton.__version__)
    yield _fact("C compiler, for Triton's launchers", shutil.which("cc") or shutil.which("gcc") or "none")
    packages = ("vllm", "vllm_flash_attn", "msgspec", "safetensors", "ml_dtypes", "peft")
    for package in packages:
        yield _fact(package, "installed" if importlib.util.find_spec(package) else "absent")
    with ExitStack() as stack:
        machine = _machine(is_dry, stack)
        device = torch.cuda.get_device_properties(machine.device)
        yield _fact("device", f"{device.name}, compute capability {device.major}.{device.minor}")
        yield _fact("memory", f"{device.total_memory / (1 << 30):.1f} GiB")
        yield _fact("multiprocessors", device.multi_processor_count)
        limits = machine.limits
        if limits is not None:
            yield _fact("copied TB/s", round(limits.bytes_per_s / 1e12, 3))
            yield _fact("bf16 TFLOP/s", round(limits.flops_per_s / 1e12, 1))
            yield _fact("a launch in a graph, µs", round(limits.launch_s * 1e6, 2))


def _demo(is_dry: bool) -> Iterator[Record]:
    from motet.benchmarks.gpu.demo_rows import check_demo

    with ExitStack() as stack:
        yield from check_demo(_machine(is_dry, stack))


def _kernels(is_dry: bool, names: tuple[str, ...]) -> Iterator[Record]:
    """Sections of `run.py`: kernels against float64 and their floors."""
    from motet.benchmarks.gpu.run import sections

    machine = Machine.find(is_dry)
    for name, section in sections(machine, "kernels"):
        if name.split(" ")[0] in names:
            for row in section():
                yield row.record


def _decodes(is_dry: bool, num_sequences: int) -> Iterator[Record]:
    from motet.benchmarks.gpu.decode_rows import time_decodes

    with ExitStack() as stack:
        yield from time_decodes(_machine(is_dry, stack), _twins(is_dry), num_sequences)


def _float8_decodes(is_dry: bool) -> Iterator[Record]:
    from motet.benchmarks.gpu.decode_rows import time_float8_decodes

    with ExitStack() as stack:
        yield from time_float8_decodes(_machine(is_dry, stack), _twins(is_dry), 64)


def _hybrid_decodes(is_dry: bool) -> Iterator[Record]:
    from motet.benchmarks.gpu.decode_rows import time_hybrid_decodes

    with ExitStack() as stack:
        yield from time_hybrid_decodes(_machine(is_dry, stack), _twins(is_dry), 64)


def _prompts(is_dry: bool) -> Iterator[Record]:
    from motet.benchmarks.gpu.prompt_rows import time_prompts

    with ExitStack() as stack:
        yield from time_prompts(_machine(is_dry, stack), _twins(is_dry))


def _layers(is_dry: bool) -> Iterator[Record]:
    from motet.benchmarks.gpu.decode_rows import time_layers

    with ExitStack() as stack:
        yield from time_layers(_machine(is_dry, stack), _twins(is_dry))


def _long(is_dry: bool) -> Iterator[Record]:
    from motet.benchmarks.gpu.decode_rows import time_long_beside_short

    with ExitStack() as stack:
        yield from time_long_beside_short(_machine(is_dry, stack), _twins(is_dry))


def _sweep(is_dry: bool) -> Iterator[Record]:
    from motet.benchmarks.gpu.sweep import sweep

    for kind, found in sweep(is_dry).items():
        yield {"kind": "sweep", "case": kind, **found}


def _machine(is_dry: bool, stack: ExitStack) -> Machine:
    """The GPU, or a stand-in until `stack` is closed."""
    if not is_dry:
        return Machine.find(False)
    from motet.tests.rigs.stand_in_gpu.gpu_worker import gpu_of_twins

    stack.enter_context(gpu_of_twins())
    return Machine(torch.device("cuda", 0), torch.float32, is_dry=True)


def _twins(is_dry: bool) -> Any:
    """Kernels of the stand-in's engines: interpreted, Triton's take minutes. None: the best for the device."""
    if not is_dry:
        return None
    from motet.tests.rigs.stand_in_gpu.gpu_worker import twins

    return twins()


def _fact(name: str, value: object) -> Record:
    return {"kind": "fact", "name": name, "value": value}
