"""The benchmark of FlashAttention's figures: what it counts, and that its script runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.benchmarks.papers import flash

ROOT = Path(__file__).parents[2]


def test_accesses_of_the_paper_s_figure() -> None:
    """Its standard attention has masks and dropout too, which are not counted; its FlashAttention is met."""
    gigabytes = 2 * flash.GPT_HEADS / 1e9
    assert flash.flash_accesses(1024, 64, flash.SRAM_ELEMENTS, True) * gigabytes == pytest.approx(4.4, rel=0.1)
    assert 20 < flash.standard_accesses(1024, 64, True) * gigabytes < 40.3


@given(st.integers(8, 13), st.integers(5, 7), st.integers(0, 2))
def test_accesses_grow_as_the_paper_says(log_tokens: int, log_dim: int, log_sram: int) -> None:
    """Θ(N² d² / M), within the accesses that do not depend on M."""
    tokens, dim, sram = 1 << log_tokens, 1 << log_dim, 4 * (1 << log_dim) * (16 << log_sram)
    once = 2 * tokens * dim
    passes = flash.flash_accesses(tokens, dim, sram) - once
    assert flash.flash_accesses(2 * tokens, dim, sram) - 2 * once == 4 * passes
    assert flash.flash_accesses(tokens, dim, 2 * sram) - once == passes // 2
    assert passes == tokens**2 * 4 * dim * (3 * dim + 4) // sram


def test_our_accesses_are_those_of_the_kernel_s_blocks() -> None:
    header = (ROOT / "kernels/cpp/attention.h").read_text()
    assert re.search(r"kMostQueries = (\d+);", header)[1] == str(flash.NUM_QUERIES)  # type: ignore[index]
    shape, rows = flash.SHAPE, flash.NUM_QUERIES // flash.GROUP
    once = rows * (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    assert flash.our_accesses(rows, 0) == flash.our_accesses(rows, 1 << 20) == once
    of_keys = 2 * shape.num_kv_heads * shape.head_dim
    assert flash.our_accesses(2 * rows, 0) == 2 * once + rows * of_keys  # the second block sees the first one's keys
    assert flash.our_accesses(2 * rows, 1 << 20) == 2 * once


@pytest.mark.parametrize("key_scale", [1.0, 3.0])
def test_all_compute_the_same(key_scale: float) -> None:
    """Within bfloat16: its unit roundoff is 2^-8."""
    errors = flash.deviations(128, key_scale)
    assert set(errors) == {"ours", "twin", "standard"} and max(errors.values()) < 2**-6
    prompt = flash.Prompt(64, 64)
    fused = prompt.fused()()[0].transpose(0, 1).float()
    torch.testing.assert_close(prompt.ours().float(), fused, atol=2**-6, rtol=2**-6)


def test_the_script_ends_with_its_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["flash", "--lengths", "512", "1024", "--longest", "2048", "--repetitions", "1"])
    monkeypatch.setattr(flash, "in_fresh_process", flash.memory_and_time)  # a process for each takes seconds
    num_threads = torch.get_num_threads()
    try:
        flash.main()
    finally:
        torch.set_num_threads(num_threads)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["deviation_over_standard"][1] <= 1
    assert found["standard_over_ours"] > 0 and set(found["gpt2_gb"]) == {"standard", "flash"}
