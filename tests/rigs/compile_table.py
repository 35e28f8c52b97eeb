"""The table of the compiled Triton kernels in `tests/kernels/compiled.md`, and the rules that they keep to.

`python -m motet.tests.rigs.compile_table` compiles with the installed Triton what the product launches, prints what
breaks a rule, and puts the results into the page. A folder that holds another Triton can be named, and as many as
there are: each compiles in a process of its own. `scripts/tritons` gets those that torch's CUDA builds pin.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

from motet.kernels.float8_kv import SCALE_BYTES
from motet.tests.rigs.kernel_launches import CASES
from motet.tests.rigs.triton_compile import CHIPS, Compiled, Launch, compile_launch, recorded

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests" / "kernels" / "compiled.md"
BEGIN, END = "<!-- made by scripts/tritons", "<!-- end of the table -->"
NARROWEST_BYTES = 16
# Bytes of a thread's stack that are suffered. On 10.0 the compiler gives chunks of heads of 256 but 128 registers.
SPILLED_BYTES = {80: 0, 90: 0, 100: 16}
SPILLED_WITH_SCALES = 8  # likewise: Tritons 3.6 and 3.7, decodes of heads of 128 on KV of eight bits, on 9.0


@dataclass(frozen=True)
class Intent:
    """What is meant of a kernel. `programs`: at once on a multiprocessor, at least, by compute capability."""

    programs: tuple[int, int, int]  # on 8.0, 9.0 and 10.0
    has_products: bool = False
    reads_wide: bool = False  # LoRA's weights or K and V, 16 bytes at a time, in asynchronous copies
    rounds_ahead: int = 0  # rounds of its loop for which copies are under way while one is computed
    spilled_bytes: int = 0  # that are suffered before its loop or after it


# A program of long products has the registers of a multiprocessor to itself: its products keep it busy. The others live
# on memory, so several run at once: what is under way, programs times rounds ahead times a round's bytes, is to exceed
# the 20 to 40 KB that a multiprocessor's share of the memory's bandwidth takes to arrive.
INTENTS = {
    "decode_kernel": Intent((2, 2, 2), has_products=True, reads_wide=True, rounds_ahead=1),
    "chunk_kernel": Intent((1, 1, 1), has_products=True, reads_wide=True, rounds_ahead=1),
    "shrink_kernel": Intent((2, 2, 2), has_products=True, reads_wide=True, rounds_ahead=2),
    "expand_kernel": Intent((2, 2, 2), has_products=True, reads_wide=True, rounds_ahead=2),
    # Tritons 3.6 and 3.9 spill on 8.0 with the tiles that are the fastest on 9.0.
    "grouped_linear_kernel": Intent((1, 1, 1), has_products=True, reads_wide=True, rounds_ahead=1, spilled_bytes=96),
    "split_kernel": Intent((8, 8, 8)),
    "combine_kernel": Intent((6, 6, 6)),
    "write_kv_kernel": Intent((8, 8, 8)),
    "group_kernel": Intent((2, 2, 2)),
    "combine_pairs_kernel": Intent((6, 6, 6)),
    "pair_tiles_kernel": Intent((6, 6, 6)),
    "norm_kernel": Intent((2, 2, 2)),
    "convolution_kernel": Intent((4, 4, 4)),
    "recurrence_kernel": Intent((8, 8, 8)),
    "gated_norm_kernel": Intent((2, 2, 2)),
    "quantise_kernel": Intent((2, 2, 2)),
    "gated_kernel": Intent((8, 8, 8)),
}


def broken_rules(launch: Launch, built: Compiled) -> Iterator[str]:
    """What is wrong with a compiled kernel, a line for each."""
    intent, chip = INTENTS[launch.name], CHIPS[built.capability]
    is_exact = launch.args.get("PRECISION") == "ieee"  # float32, for which there are no matrix instructions
    with_scales = SPILLED_WITH_SCALES if _has_scales(launch) else 0
    suffered = max(SPILLED_BYTES[built.capability], with_scales, intent.spilled_bytes)
    if built.stack_bytes > suffered or built.local_bytes:
        yield f"spills: {built.stack_bytes} bytes of stack, {built.local_bytes} local"
    if built.shared_bytes > chip.shared_bytes_of_program:
        yield f"{built.shared_bytes} bytes of shared memory, of {chip.shared_bytes_of_program}"
    num_programs = intent.programs[list(CHIPS).index(built.capability)]
    if built.programs < num_programs:
        yield f"{built.programs} programs run at once, not {num_programs}: {built}"
    if bool(built.matrix_instructions) != (intent.has_products and not is_exact):
        yield f"its matrix instructions: {built.matrix_instructions}"
    if intent.reads_wide:
        least = 2 if launch.args.get("bias") is not None else 4  # which is read once, after the loop
        if any(size < least for size in built.load_bytes):
            yield f"reads less than 4 bytes at a time: {dict(built.load_bytes)}"
        sizes = set(built.copy_bytes)
        if _has_scales(launch):  # the compiler gives V 8 bytes in some kernels, and a scale has 4
            sizes -= {NARROWEST_BYTES // 2, SCALE_BYTES}
        if sizes != {NARROWEST_BYTES}:
            yield f"copies other than {NARROWEST_BYTES} bytes at a time, or nothing: {dict(built.copy_bytes)}"
    if intent.rounds_ahead and (built.rounds_ahead or 0) < intent.rounds_ahead:
        yield f"copies {built.rounds_ahead} rounds ahead, not {intent.rounds_ahead}"


def _has_scales(launch: Launch) -> bool:
    """Of KV in eight bits, which chips before 9.0 are refused: they have no instructions for float8."""
    return "kv" in launch.args and launch.args["scales"] is not None


@dataclass(frozen=True)
class Cell:
    """What the page says of a kernel for one chip and Triton."""

    registers: int
    shared_kib: int
    programs: int
    rounds_ahead: int | None


Cells = dict[str, list[Cell | None]]  # by "kernel, case", in the order of CHIPS; None: the chip is refused


def compiled_case(case: str) -> tuple[Cells, list[str]]:
    """A case's cells, and the rules that it breaks."""
    cells: Cells = {}
    broken = []
    with recorded() as launches:
        CASES[case][0]()
    for launch in launches:
        key = f"`{launch.name}`, {case}"
        if key in cells:  # a kernel that a case launches more than once, in another way
            key += f", {sum(key in other for other in cells) + 1}"
        cells[key] = []
        for capability in CHIPS:
            if capability < 90 and _has_scales(launch):
                cells[key].append(None)
                continue
            built = compile_launch(launch, capability)
            broken += [f"{key}, sm_{capability}: {rule}" for rule in broken_rules(launch, built)]
            shared_kib = -(-built.shared_bytes // 1024)
            cells[key].append(Cell(built.registers, shared_kib, built.programs, built.rounds_ahead))
    return cells, broken


def sources_digest() -> str:
    """Of the sources that decide what is compiled."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "kernels/gpu").glob("*.py"), ROOT / "tests/rigs/kernel_launches.py"]):
        if path.name != "flash_attention.py":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def table(by_version: Mapping[str, Cells]) -> str:
    """The page's table. A number is one, or one for each Triton, in their order."""
    versions = list(by_version)
    chips = [f"sm_{capability}" for capability in CHIPS]
    lines = [
        f"{BEGIN}; sources {sources_digest()}; Triton {', '.join(versions)} -->",
        f"| kernel, case | {' | '.join(chips)} |",
        f"| --- | {' | '.join('---' for _ in chips)} |",
    ]
    for key in by_version[versions[0]]:
        row = [[by_version[version][key][index] for version in versions] for index in range(len(chips))]
        lines.append(f"| {key} | {' | '.join(map(_joined, row))} |")
    return "\n".join([*lines, END])


def _joined(cells: Sequence[Cell | None]) -> str:
    """A chip's numbers, of each Triton."""
    built = [cell for cell in cells if cell is not None]
    if not built:
        return "–"

    def one(numbers: list[int | None]) -> str:
        said = ["–" if number is None else str(number) for number in numbers]
        return said[0] if len(set(said)) == 1 else "/".join(said)

    names = ("registers", "shared_kib", "programs", "rounds_ahead")
    return " · ".join(one([getattr(cell, name) for cell in built]) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the results; leave the page as it is")
    parser.add_argument("folders", nargs="*", type=Path, help="each holds another Triton, as `pip --target` leaves it")
    arguments = parser.parse_args()
    results: dict[str, Cells] = {}
    broken: list[str] = []
    for folder in arguments.folders:
        said = subprocess.run(
            [sys.executable, "-m", "motet.tests.rigs.compile_table", "--json"],
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
            stdout=subprocess.PIPE,
            check=True,
        )
        reported = json.loads(said.stdout)
        results[reported["triton"]] = {
            key: [cell and Cell(**cell) for cell in cells] for key, cells in reported["cells"].items()
        }
        broken += reported["broken"]
    own: Cells = {}
    for case in CASES:
        cells, wrong = compiled_case(case)
        own |= cells
        broken += [f"Triton {triton.__version__}: {line}" for line in wrong]
    if arguments.json:
        said_cells = {key: [cell and vars(cell) for cell in cells] for key, cells in own.items()}
        print(json.dumps({"triton": triton.__version__, "cells": said_cells, "broken": broken}))
        return
    results[triton.__version__] = own
    print("\n".join(broken) or "every kernel keeps to the rules")
    page = PAGE.read_text()
    before, after = page[: page.index(BEGIN)], page[page.index(END) + len(END) :]
    PAGE.write_text(before + table(results) + after)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
