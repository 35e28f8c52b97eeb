"""The Triton kernels without a GPU, compiled ahead of time. Interpreted they run in `tests/interpreted`."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

import triton

from motet.tests.rigs.compile_table import PAGE, broken_rules, compiled_case, sources_digest, table
from motet.tests.rigs.kernel_launches import CASES, lora
from motet.tests.rigs.triton_compile import compile_launch, recorded

DEADLINE_S = 3600  # of a program that takes up to four minutes on a fast machine
pytestmark = pytest.mark.timeout(DEADLINE_S)


@pytest.mark.parametrize("case", CASES)
def test_compiles_for_each_chip(case: str) -> None:
    """Every rule of `compile_table.py` is kept, and the page says what comes out."""
    with recorded() as launches:
        CASES[case][0]()
    assert {launch.name for launch in launches} == CASES[case][1]
    cells, broken = compiled_case(case)
    assert broken == []
    rows = [line for line in PAGE.read_text().splitlines() if f", {case} |" in line or f", {case}, " in line]
    versions = re.search(r"; Triton ([\d., ]+) -->", PAGE.read_text())
    assert versions is not None
    if triton.__version__ in (listed := versions[1].split(", ")):
        said = [_of_one(row, listed.index(triton.__version__)) for row in rows]
        made = [_of_one(row, 0) for row in table({triton.__version__: cells}).splitlines()[3:-1]]
        assert [row for row in said if row in made] == made, "scripts/tritons makes the page's table again"


def _of_one(row: str, index: int) -> str:
    """A row of the table, of one of its Tritons."""
    head, *cells = row.strip("| ").split(" | ")

    def one(number: str) -> str:
        of_each = number.split("/")  # one of each Triton, or one of all
        return of_each[index % len(of_each)]

    return " | ".join([head, *(" · ".join(map(one, cell.split(" · "))) for cell in cells)])


def test_the_page_is_of_these_sources() -> None:
    """The other Tritons' numbers, too, are of the kernels as they are."""
    assert f"; sources {sources_digest()};" in PAGE.read_text(), "scripts/tritons makes the page's table again"


def broken_with(old: str, new: str, kernel: str, case: str, folder: Path) -> str:
    """What the rules say of a kernel in whose module `old` is replaced by `new`."""
    with recorded() as launches:
        CASES[case][0]()
    (launch,) = (launch for launch in launches if launch.name == kernel)
    source = inspect.getsource(sys.modules[launch.kernel.fn.__module__])
    assert old in source
    file = folder / "changed.py"
    file.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("motet.kernels.gpu.changed", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    changed = replace(launch, kernel=getattr(module, kernel))
    return "\n".join(broken_rules(changed, compile_launch(changed, 90)))


@pytest.mark.parametrize("kernel", ["shrink_kernel", "expand_kernel"])
def test_weights_read_two_bytes_at_a_time_break_a_rule(kernel: str, tmp_path: Path) -> None:
    hidden = "tl.load(place).to(tl.int32)"  # of which the compiler does not know that it is aligned
    said = broken_with(f"tl.multiple_of({hidden}, 16)", hidden, kernel, "64 adapters", tmp_path)
    assert "reads less than 4 bytes at a time" in said


def test_pages_looked_up_in_the_round_that_reads_them_break_a_rule(tmp_path: Path) -> None:
    """Nothing is copied then while a tile of K and V is computed."""
    now = "page=pages_of(table, block, end, BLOCK, PAGE)"
    said = broken_with("page=page", now, "decode_kernel", "decode", tmp_path)
    assert "copies 0 rounds ahead" in said


def test_a_program_goes_through_many_tiles() -> None:
    """Of B, for gate and up of 64 adapters; of K and V, whatever lengths are."""
    with recorded() as launches:
        lora(64, 1, modules=(4, 5))
        CASES["decode"][0]()
    programs = {launch.name: launch.num_programs for launch in launches}
    assert programs["expand_kernel"] == 1056  # of 14,336 tiles of 128 columns
    assert programs["decode_kernel"] == 1056


def test_long_products_use_hoppers_own_instructions() -> None:
    for case in ("chunk", "one adapter", "many pairs"):
        with recorded() as launches:
            CASES[case][0]()
        for launch in launches:
            assert "wgmma.mma_async" in compile_launch(launch, 90).matrix_instructions, launch.name
