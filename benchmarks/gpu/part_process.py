"""Runs one part of a first run in a process of its own: whatever it does, the next part begins."""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motet.benchmarks.gpu.first_parts import Part

_TAIL = 30  # lines of its output that a report shows of a part that did not end well
_KILL_S = 10.0  # that a killed process may take to go


@dataclass(frozen=True)
class PartResult:
    """`problem`: why it ended early; None: it did not. `records`: what it had found by then."""

    name: str
    problem: str | None
    took_s: float
    records: tuple[dict[str, Any], ...]
    tail: tuple[str, ...]  # of its output, if there is a problem


def run_part(part: Part, limit_s: float, folder: Path) -> PartResult:
    """Runs it for at most `limit_s`; its records and its output are in `folder` as they come.

    The process is forked: it begins with all that was imported here, and must be the first to touch a GPU.
    """
    records, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    started = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_in_process, args=(part, records, log))
    process.start()
    process.join(limit_s)
    problem = None
    if process.is_alive():
        problem = f"it was not done after {limit_s:.0f} s and was killed"
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join(_KILL_S)  # a process that waits for a hung GPU may not go: the next part begins all the same
    elif process.exitcode:
        status = process.exitcode
        problem = f"it was killed by {signal.Signals(-status).name}" if status < 0 else "it failed"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    tail = tuple(lines[-_TAIL:]) if problem else ()
    if problem == "it failed" and lines:
        problem = f"it failed: {lines[-1][:300]}"
    return PartResult(part.name, problem, round(time.monotonic() - started, 1), tuple(found), tail)


def _in_process(part: Part, records: Path, log: Path) -> None:
    os.setsid()  # so that all that it starts can be killed with it
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()  # reports where a segmentation fault happened
    with records.open("w") as file:
        for record in part.run():
            file.write(json.dumps(_finite(record)) + "\n")
            file.flush()


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
