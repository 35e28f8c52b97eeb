"""Programs for GPUs, dry; that no part of the first run ends it; and what its report makes of what it finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64")

from motet.benchmarks.gpu.demo_rows import Answer, compared, counted_waits
from motet.benchmarks.gpu.findings import findings
from motet.benchmarks.gpu.first_report import write_report
from motet.benchmarks.gpu.part_process import PartResult
from motet.kernels.plain.experts import PlainExperts
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import stand_in_gpu
from motet.workers.wire.messages import TokenLogprobs

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 3600  # of a program that takes half a minute on a fast machine
pytestmark = pytest.mark.timeout(DEADLINE_S)
DECODES = {"decode-1", "decode-64", "decode-256", "decode-64-float8", "hybrid-64"}
PARTS = {"versions", "demo", "checks", "times", *DECODES, "prompts", "layers", "sweep", "long"}
STATES = {"states", "prompt's states"}
BAD_PARTS = """
import ctypes, sys, time
from pathlib import Path
from motet.benchmarks.gpu.first_parts import Part
from motet.benchmarks.gpu.part_process import run_part

def dies():
    yield {"kind": "fact", "name": "before", "value": float("nan")}
    ctypes.string_at(0)

def hangs():
    yield {"kind": "fact", "name": "before", "value": 2}
    time.sleep(3600)

def raises():
    raise ValueError("no such kernel")
    yield

def ends():
    yield {"kind": "fact", "name": "all", "value": 3}

folder = Path(sys.argv[1])
for part in (Part("dies", 60, dies), Part("hangs", 2, hangs), Part("raises", 60, raises), Part("ends", 60, ends)):
    result = run_part(part, part.limit_s, folder)
    print(result.name, result.problem, [record["value"] for record in result.records])
    print(*result.tail, sep="\\n", file=sys.stderr)
"""


def test_runs_dry(tmp_path: Path) -> None:
    """Every part ends, and the CPU's tokens come from the stand-in; nothing is timed, so nothing is slow."""
    command = [sys.executable, "benchmarks/gpu/first_run.py", "--dry", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}\n{(tmp_path / 'report.md').read_text()}"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["look_at"], report["left_out"]) == ([], [])
    parts = {part["name"]: part["records"] for part in report["parts"]}
    assert parts.keys() == PARTS
    assert all(parts.values()), "every part has found something"
    rows = [record for record in parts["demo"] if record["kind"] == "row"]
    assert [row["note"] for row in rows] == ["2 of 2 alike in all tokens", "8 of 8 alike in all tokens"]
    (moved,) = (record["value"] for record in parts["demo"] if record["kind"] == "fact")
    assert moved > 0, "pages went behind the pool"
    (waits,) = (record for record in parts["demo"] if record["kind"] == "waits")
    assert waits["num_steps"] > 0
    assert waits["lines"] == {}, "tokens are waited for by an event, and nothing else is"
    assert "What to look at" in (tmp_path / "report.md").read_text()


def test_a_line_that_waits_is_named() -> None:
    chosen, weights = torch.tensor([[0, 2], [1, 0]]), torch.ones(2, 2)
    with stand_in_gpu():
        chosen, weights, waits = chosen.to("cuda"), weights.to("cuda"), Counter[str]()
        with counted_waits(waits):
            PlainExperts().group(chosen, weights, 0, 3)
    assert waits and all(line.startswith("kernels/plain/experts.py:") for line in waits)


def test_no_part_ends_the_run(tmp_path: Path) -> None:
    """What a part has found before it died or hung is kept."""
    run = subprocess.run(
        [sys.executable, "-c", BAD_PARTS, str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert run.stdout.splitlines() == [
        "dies it was killed by SIGSEGV ['nan']",
        "hangs it was not done after 2 s and was killed [2]",
        "raises it failed: ValueError: no such kernel []",
        "ends None [3]",
    ], run.stderr
    assert "Fatal Python error: Segmentation fault" in run.stderr


def answer(tokens: list[int], chosen: float = -1.0, second: float = -1.1) -> Answer:
    """The second most likely token is always 7."""
    reported = [TokenLogprobs(chosen, [token, 7], [chosen, second]) for token in tokens]
    return Answer(is_greedy=True, token_ids=tokens, logprobs=reported)


def test_greedy_tokens_may_differ_in_near_ties_only() -> None:
    expected = answer([1, 2, 3])
    difference, alike = compared([(answer([1, 2, 3], chosen=-1.05), expected)], 0.25)
    assert difference == pytest.approx(0.05)
    assert alike == "1 of 1 alike in all tokens"
    assert compared([(answer([1, 7, 3]), expected)], 0.25)[0] == pytest.approx(0.1)  # 7 was 0.1 behind
    assert compared([(answer([1, 8, 3]), expected)], 0.25)[0] == float("inf")  # 8 was not near
    assert compared([(Answer(True, error="no page"), expected)], 0.25)[1] == "a sequence failed: no page"


def result(name: str, *records: dict[str, Any], problem: str | None = None) -> PartResult:
    return PartResult(name, problem, 1.0, records, ())


def row(kernel: str, case: str, **given: Any) -> dict[str, Any]:
    none: dict[str, Any] = {"error": None, "tolerance": None, "time_s": None, "others": {}, "note": ""}
    return {"kind": "row", "kernel": kernel, "case": case, "is_wrong": False, **none, **given}


def test_the_gravest_comes_first(tmp_path: Path) -> None:
    line = {"component": "adapters", "floor_s": 1.6e-3, "measured_s": 4e-3}
    fine = {"component": "KV", "floor_s": 2.6e-3, "measured_s": 2.9e-3}
    step = {
        "kind": "step",
        "case": "B 64",
        "step_s": 7e-3,
        "lines": [line, fine],
        "launches": 700.0,
        "expected_launches": 580,
        "kernels": [],
    }
    results = [
        result("decode-64", step),
        result("demo", {"kind": "waits", "num_steps": 10, "lines": {"workers/a.py:3": 20, "workers/b.py:4": 10}}),
        result(
            "layers",
            row("LoRA", "pages of 2", num_layers=2, time_s=1e-5),
            row("LoRA", "pages of 32", num_layers=32, time_s=2e-5),
        ),
        result("checks", row("attention", "heads of 80", error="nan", tolerance=0.01, is_wrong=True)),
        result("sweep", {"kind": "sweep", "case": "chunk", "us": 80.0, "as_it_is_us": 100.0, "changed": {"stages": 3}}),
        result("long", problem="it was killed by SIGSEGV"),
    ]
    found = findings(results)
    assert [(finding.gravity, finding.part) for finding in found] == [
        (0, "long"),
        (1, "checks"),
        (2, "demo"),
        (2, "demo"),
        (3, "decode-64"),
        (3, "layers"),
        (4, "decode-64"),
        (4, "sweep"),
    ]
    assert found[2].look_at == "workers/a.py:3"
    assert found[2].what.startswith("the host waits 2.00 times a step")
    assert found[4].what == "B 64: adapters takes 4.00 ms, 2.40 above its floor"
    write_report(results, ["extra"], tmp_path, is_dry=False)
    said = (tmp_path / "report.md").read_text()
    assert "| wrong | checks | attention, heads of 80: error nan, at most 0.01 | kernels/ |" in said
    assert "Left out, as the time was over: extra." in said


def test_one_wait_a_step_is_nothing_to_look_at() -> None:
    waits = {"kind": "waits", "num_steps": 10, "lines": {"kernels/staging.py:3": 11}}
    assert findings([result("demo", waits)]) == []


def test_the_benchmark_for_gpus_runs_dry() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/gpu/run.py", "--dry"], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["wrong"] == []
    assert summary["num_checked"] > 20


def test_the_sweep_for_gpus_runs_dry() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/gpu/sweep.py", "--dry"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert "failed" not in run.stdout
    assert set(json.loads(run.stdout.splitlines()[-1])["fastest"]) == {"decode", "chunk", "LoRA", *STATES}
