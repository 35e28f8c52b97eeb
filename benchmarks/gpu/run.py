"""Every GPU kernel checked against float64 and timed against the machine's limits; then the whole engine.

Needs an NVIDIA GPU, torch, Triton, ml_dtypes (which JAX and ONNX bring along) and this checkout, nothing else. PEFT and
FlashAttention are compared with if they are installed. Prints a table, then one line of JSON. Inputs are random and new
in each run. `--dry` runs everything on a CPU, interpreted, with tiny shapes and without times, so that the script
itself can be tested anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported only once motet can be
    from motet.benchmarks.gpu.machine import Machine, Row

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU, interpreted, tiny, without times")
    parser.add_argument("--only", choices=("kernels", "engine"), help="half of it")
    parser.add_argument("--deadline-s", type=float, default=450.0, help="what has not begun by then is left out")
    arguments = parser.parse_args()
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        make_importable(Path(folder))
        sys.exit(_run(arguments))


def make_importable(folder: Path) -> None:
    """Makes `import motet` find this checkout where it is not installed, by a link of that name to it."""
    (folder / "motet").symlink_to(ROOT)
    sys.path.insert(0, str(folder))
    from motet.benchmarks.gpu.plain_messages import stand_in_for_msgspec

    if stand_in_for_msgspec():
        print("msgspec is not installed: the engine's messages are plain dataclasses here")


def _run(arguments: argparse.Namespace) -> int:
    import torch
    import triton

    if not arguments.dry and not torch.cuda.is_available():
        print("no NVIDIA GPU is visible to torch: --dry runs on the CPU", file=sys.stderr)
        return 2
    from motet.benchmarks.gpu.machine import Machine
    from motet.benchmarks.gpu.report import Report

    started = time.perf_counter()
    machine = Machine.find(arguments.dry)
    report = Report(machine, torch.__version__, triton.__version__)
    for name, section in sections(machine, arguments.only):
        if time.perf_counter() - started > arguments.deadline_s:
            report.left_out(name, f"{arguments.deadline_s:g} s were over")
            continue
        try:
            for row in section():
                report.add(row)
        except Exception as error:  # the others are still of use
            traceback.print_exc()
            report.failed(name, error)
        if not arguments.dry:
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps(report.summary(time.perf_counter() - started)))
    return 1 if report.is_bad else 0


def sections(machine: Machine, only: str | None) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """The sections by name, in their order. `only`: "kernels" or "engine"."""
    from motet.benchmarks.gpu import attention_rows, engine_rows, lora_rows, peft_rows, recurrence_rows, row_rows
    from motet.kernels.backend import choose_kernels, triton_kernels

    chosen = triton_kernels(machine.device, machine.dtype)
    if only != "engine":
        for section in (
            attention_rows.check_attention,
            lora_rows.check_lora,
            recurrence_rows.check_recurrence,
            attention_rows.time_decode,
            attention_rows.time_float8_kv,
            attention_rows.time_chunks,
            attention_rows.time_write_kv,
            lora_rows.time_lora,
            recurrence_rows.time_recurrence,
            row_rows.time_norm,
            row_rows.time_float8,
            row_rows.time_activations,
            row_rows.time_experts,
            row_rows.time_page_copies,
        ):
            yield section.__name__, lambda section=section: section(machine, chosen)  # type: ignore[misc]
        if not machine.is_dry:
            best = choose_kernels(machine.device, machine.dtype, 1)
            if best.choice != chosen.choice:
                yield f"time_decode by {best.choice}", lambda: attention_rows.time_decode(machine, best)
    if only != "kernels":
        yield "check_engine", lambda: engine_rows.check_engine(machine)
        yield "time_engine", lambda: engine_rows.time_engine(machine)
        yield "transformers + PEFT", lambda: peft_rows.time_peft(machine)


if __name__ == "__main__":
    main()
