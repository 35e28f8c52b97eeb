"""What a first run's records say is to be looked at, the gravest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motet.benchmarks.gpu.part_process import PartResult

Record = Mapping[str, Any]
_OF_FLOOR = 1.5  # time over floor from which a kernel is worth a look
_LOST_S = 0.2e-3  # of a step
_WAITS_A_STEP = 1.1  # one, for the tokens, and a few at the start
_SPREAD = 1.1  # of a kernel on pages of 32 layers over one on pages of two
_TUNED = 0.97  # time of other tiles over that of those in use
_MORE_LAUNCHES = 1.1


@dataclass(frozen=True)
class Finding:
    """`gravity`: 0 did not run, 1 wrong, 2 the host waits, 3 slow, 4 may be faster."""

    gravity: int
    part: str
    what: str
    look_at: str


def findings(results: Sequence[PartResult]) -> list[Finding]:
    """All of them. Empty: everything ran, is right and near its floor."""
    found = [finding for result in results for finding in _of_part(result)]
    return sorted(found, key=lambda finding: finding.gravity)


def _of_part(result: PartResult) -> Iterator[Finding]:
    if result.problem is not None:
        yield Finding(0, result.name, result.problem, f"{result.name}.log")
    rows = [record for record in result.records if record["kind"] == "row"]
    for row in rows:
        what = f"{row['kernel']}, {row['case']}"
        if row["is_wrong"]:
            note = f"; {row['note']}" if row["note"] else ""
            yield Finding(1, result.name, f"{what}: error {row['error']}, at most {row['tolerance']}{note}", "kernels/")
        if (row.get("of_floor") or 0.0) > _OF_FLOOR:
            yield Finding(3, result.name, f"{what}: {row['of_floor']:.2f} times its floor", "sweep, docs/kernels.md")
    yield from _spread(result.name, rows)
    for record in result.records:
        if record["kind"] == "waits":
            yield from _waits(result.name, record)
        elif record["kind"] == "step":
            yield from _step(result.name, record)
        elif record["kind"] == "sweep" and (record["us"] < _TUNED * record["as_it_is_us"]):
            what = f"{record['case']}: {record['us']} µs with {record['changed']}, {record['as_it_is_us']} µs as it is"
            yield Finding(4, result.name, what, "AttentionTuning, LoraTuning")


def _waits(part: str, record: Record) -> Iterator[Finding]:
    """More than one wait in a step: each line of them, the one for the tokens among them."""
    total, num_steps = sum(record["lines"].values()), max(record["num_steps"], 1)
    if total > _WAITS_A_STEP * num_steps:
        for line, count in record["lines"].items():
            yield Finding(2, part, f"the host waits {count / num_steps:.2f} times a step here", line)


def _step(part: str, record: Record) -> Iterator[Finding]:
    lost = [line for line in record["lines"] if line["measured_s"] is not None]
    for line in sorted(lost, key=lambda line: line["floor_s"] - line["measured_s"]):
        lost_s = line["measured_s"] - line["floor_s"]
        if lost_s > max(_LOST_S, (_OF_FLOOR - 1) * line["floor_s"]):
            what = f"{record['case']}: {line['component']} takes {line['measured_s'] * 1e3:.2f} ms"
            what += f", {lost_s * 1e3:.2f} above its floor"
            yield Finding(3, part, what, _WHERE[line["component"]])
    expected, seen = record["expected_launches"], record["launches"]
    if seen > _MORE_LAUNCHES * expected:
        what = f"{record['case']}: {seen:.0f} launches a step, {expected} are expected"
        yield Finding(4, part, what, "the list of kernels in the report's JSON")


_WHERE = {
    "weights": "cuBLAS: kernels/backend.py",
    "KV": "kernels/gpu/attention.py",
    "adapters": "kernels/gpu/lora.py",
    "launches": "gaps: workers/execution/graphs.py and the host's work beside the steps",
    "other kernels": "kernels/gpu/rows.py, sampling, copies",
}


def _spread(part: str, rows: Sequence[Record]) -> Iterator[Finding]:
    """The same kernel on pages of few layers and of many."""
    timed: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.get("num_layers") is not None and row["time_s"] is not None:
            timed.setdefault(row["kernel"], []).append((row["num_layers"], row["time_s"]))
    for kernel, times in timed.items():
        (_, few_s), (layers, many_s) = min(times), max(times)
        if many_s > _SPREAD * few_s:
            what = f"{kernel} takes {many_s / few_s:.2f} times as long on pages of {layers} layers"
            yield Finding(3, part, what, "the TLB: pages with one layer each, docs/gpu.md")
