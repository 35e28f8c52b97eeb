"""Times other tiles, stages and splits of the Triton kernels on this GPU, beside those in use.

Prints a line for each choice, then one line of JSON with the fastest. Needs what `run.py` needs. `--dry` tries two of
each on a CPU, interpreted, with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from run import make_importable  # type: ignore[import-not-found]  # it makes motet importable


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="on the CPU, interpreted, tiny, without times")
    arguments = parser.parse_args()
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        make_importable(Path(folder))
        import torch

        if not arguments.dry and not torch.cuda.is_available():
            sys.exit("no NVIDIA GPU is visible to torch: --dry runs on the CPU")
        device = "cpu, interpreted" if arguments.dry else torch.cuda.get_device_name()
        print(json.dumps({"benchmark": "gpu_sweep", "device": device, "fastest": sweep(arguments.dry)}))


def sweep(is_dry: bool) -> dict[str, Any]:
    """By kind of kernel: the fastest choice, its time and that of the one in use."""
    from motet.benchmarks.gpu.machine import Machine

    machine = Machine.find(is_dry)
    found = {}
    kinds = {"decode": _decodes(machine), "chunk": _chunks(machine), "LoRA": _lora(machine)}
    kinds |= {"states": _states(machine, 64, 1), "prompt's states": _states(machine, 1, 2048)}
    for kind, tunings in kinds.items():
        times: list[tuple[float, dict[str, int]]] = []
        for changed, call in islice(tunings, 2 if is_dry else None):
            try:
                times.append((call() or 0.0, changed))
                print(f"{kind:16} {times[-1][0] * 1e6:9.1f} µs  {changed or 'as it is'}", flush=True)
            except Exception as error:  # too much shared memory, for one
                print(f"{kind:16}    failed     {changed}: {type(error).__name__}: {error}", flush=True)
        best_s, best = min(times, key=lambda pair: pair[0])
        found[kind] = {"us": round(best_s * 1e6, 1), "as_it_is_us": round(times[0][0] * 1e6, 1), "changed": best}
    return found


def _varied(default: Any, **choices: tuple[int, ...]) -> Iterator[tuple[dict[str, int], Any]]:
    """(tuning, what differs in it): the one in use first, then every combination of the choices."""
    yield {}, default
    for values in product(*choices.values()):
        changed = {key: value for key, value in zip(choices, values, strict=True) if asdict(default)[key] != value}
        if changed:
            yield changed, replace(default, **changed)


def _decodes(machine: Any) -> Iterator[tuple[dict[str, int], Callable[[], float]]]:
    """64 sequences of 4,096 tokens."""
    from motet.benchmarks.gpu.attention_rows import PagedCase
    from motet.kernels.gpu.attention import TritonAttention
    from motet.kernels.gpu.decode import DecodeTuning

    case = PagedCase(machine, [(40, 1)] * 2 if machine.is_dry else [(4096, 1)] * 64, 32, 8, 128)
    choices = {"keys": (32, 64, 128), "stages": (2, 3, 4), "split_keys": (256, 512, 1024), "programs": (396, 1056)}
    for changed, tuning in _varied(DecodeTuning(), **choices):
        attend = TritonAttention(decode_tuning=tuning).paged_attention
        calls = [lambda i=i, attend=attend: attend(case.q, case.pool[:, i], case.batch, 0.09, None) for i in range(2)]
        yield changed, lambda calls=calls: machine.time_s(calls)  # type: ignore[misc]


def _chunks(machine: Any) -> Iterator[tuple[dict[str, int], Callable[[], float]]]:
    """A chunk of 2,048 tokens at the end of 8,192."""
    from motet.benchmarks.gpu.attention_rows import PagedCase
    from motet.kernels.gpu.attention import AttentionTuning, TritonAttention

    case = PagedCase(machine, [(40, 20) if machine.is_dry else (8192, 2048)], 32, 8, 128)
    for changed, tuning in _varied(AttentionTuning(), chunk_keys=(32, 64, 128), chunk_stages=(2, 3)):
        attend = TritonAttention(tuning).paged_attention
        calls = [lambda i=i, attend=attend: attend(case.q, case.pool[:, i], case.batch, 0.09, None) for i in range(2)]
        yield changed, lambda calls=calls: machine.time_s(calls)  # type: ignore[misc]


def _lora(machine: Any) -> Iterator[tuple[dict[str, int], Callable[[], float]]]:
    """A layer's four groups for 64 rows of 64 adapters of rank 16."""
    import torch

    from motet.benchmarks.gpu.lora_rows import GROUPS, LLAMA, TINY, LoraCase
    from motet.kernels.gpu.lora import LoraTuning, TritonLora
    from motet.kernels.lora import LoraSegment

    count = 3 if machine.is_dry else 64
    case = LoraCase(machine, [16] * count, TINY if machine.is_dry else LLAMA, 4, 7)
    segments = [LoraSegment(i, i + 1, adapter) for i, adapter in enumerate(case.adapters)]
    rows = {}
    for modules in GROUPS.values():
        widths = case.sides[modules[0]][0], sum(case.sides[module][1] for module in modules)
        rows[modules] = [torch.randn(count, width, dtype=machine.dtype, device=machine.device) for width in widths]
    choices = {
        "shrink_width": (128, 256, 512),
        "shrink_stages": (2, 4),
        "expand_programs": (528, 1056, 4224),
        "most_splits": (4, 8),
    }
    for changed, tuning in _varied(LoraTuning(), **choices):
        lora = TritonLora(tuning)
        batch = lora.prepare(segments, case.geometry, machine.device)

        def call(layer: int, lora: TritonLora = lora, batch: Any = batch) -> None:
            for modules, (x, y) in rows.items():
                lora.expand(y, lora.shrink(x, case.pool, layer, batch, modules)[None], case.pool, layer, batch, modules)

        calls = [lambda layer=layer, call=call: call(layer) for layer in range(4)]
        yield changed, lambda calls=calls: machine.time_s(calls)  # type: ignore[misc]


def _states(machine: Any, num_sequences: int, num_rows: int) -> Iterator[tuple[dict[str, int], Callable[[], float]]]:
    """Of sequences with so many rows each in a layer of Qwen3.5-9B; more than a cache holds, if they are 64."""
    from motet.benchmarks.gpu.recurrence_rows import cases_of, moved
    from motet.kernels.gpu.recurrence import RecurrenceTuning, TritonRecurrence

    sequences = [[1], [2]] if machine.is_dry else [[num_rows]] * num_sequences
    case = moved(next(cases_of(machine, sequences, in_place=True))[1], machine.device)
    choices = {"matrix": (512, 1024, 4096, 16384), "stages": (1, 3), "warps": (1, 8)}
    for changed, tuning in _varied(RecurrenceTuning(least_columns=4), **choices):
        recur = TritonRecurrence(tuning)
        call = lambda recur=recur: recur(case.x, case.layer, case.pool, case.state, case.batch)  # noqa: E731
        yield changed, lambda call=call: machine.time_s([call] * 2)  # type: ignore[misc]


if __name__ == "__main__":
    main()
