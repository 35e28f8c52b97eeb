"""The report of a first run, in JSON and in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from motet.benchmarks.gpu.findings import findings
from motet.benchmarks.gpu.part_process import PartResult
from motet.benchmarks.gpu.roofline import Line, table

_GRAVITY = ("did not run", "wrong", "waits", "slow", "may be faster")


def write_report(results: Sequence[PartResult], left_out: Sequence[str], folder: Path, is_dry: bool) -> None:
    """Writes `report.json` and `report.md`. May be called again as more parts end."""
    found = findings(results)
    report = {
        "benchmark": "first_run",
        "is_dry": is_dry,
        "look_at": [asdict(finding) for finding in found],
        "left_out": list(left_out),
        "parts": [asdict(result) for result in results],
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(_markdown(report, results)) + "\n")


def _markdown(report: dict[str, Any], results: Sequence[PartResult]) -> Iterator[str]:
    yield "# The first run on a GPU" + (", dry" if report["is_dry"] else "")
    yield "\n## What to look at\n"
    if report["look_at"]:
        yield from ("| | part | what | where |", "| --- | --- | --- | --- |")
        for finding in report["look_at"]:
            what = finding["what"].replace("|", "\\|")
            yield f"| {_GRAVITY[finding['gravity']]} | {finding['part']} | {what} | {finding['look_at']} |"
    else:
        yield "Nothing: all parts ran, all is right and near its floor."
    if report["left_out"]:
        yield f"\nLeft out, as the time was over: {', '.join(report['left_out'])}."
    for result in results:
        yield f"\n## {result.name}: {result.problem or 'done'}, {result.took_s:g} s\n"
        yield from _of_part(result)


def _of_part(result: PartResult) -> Iterator[str]:
    facts = [record for record in result.records if record["kind"] == "fact"]
    yield from (f"- {fact['name']}: {fact['value']}" for fact in facts)
    rows = [record for record in result.records if record["kind"] == "row"]
    if rows:
        yield from ("| kernel | case | error | µs | of floor | note |", "| --- | --- | ---: | ---: | ---: | --- |")
    for row in rows:
        error = "" if row["error"] is None else f"{float(row['error']):.1e}" + ("!" if row["is_wrong"] else "")
        time_us = "" if row["time_s"] is None else f"{float(row['time_s']) * 1e6:.1f}"
        of_floor = "" if row.get("of_floor") is None else f"{row['of_floor']:.2f}"
        others = [f"{name} {seconds * 1e6:.1f}" for name, seconds in row["others"].items()]
        note = ", ".join([*others, row["note"]] if row["note"] else others)
        yield f"| {row['kernel']} | {row['case']} | {error} | {time_us} | {of_floor} | {note} |"
    for record in result.records:
        if record["kind"] == "step":
            lines = [Line(**line) for line in record["lines"]]
            yield f"\n{record['case']}: {record['launches']:.0f} launches, {record['expected_launches']} expected\n"
            yield table(lines, record["step_s"])
        elif record["kind"] == "waits":
            waits = ", ".join(f"{line} {count}" for line, count in record["lines"].items())
            yield f"\nThe host waited in {record['num_steps']} steps: {waits or 'never, as torch sees it'}"
        elif record["kind"] == "sweep":
            yield f"- {record['case']}: {record['us']} µs with {record['changed']}, {record['as_it_is_us']} as it is"
    if result.tail:
        yield "\n```\n" + "\n".join(result.tail) + "\n```"
