"""The table as it grows, and its summary."""

from __future__ import annotations

import math
from typing import Any

import torch

from motet.benchmarks.gpu.machine import Machine, Row


class Report:
    """Prints each row when it comes."""

    def __init__(self, machine: Machine, torch_version: str, triton_version: str) -> None:
        self._machine = machine
        self._rows: list[Row] = []
        self._problems: list[str] = []
        self._facts: dict[str, Any] = {
            "benchmark": "gpu",
            "device": "cpu, interpreted" if machine.is_dry else torch.cuda.get_device_name(machine.device),
            "torch": torch_version,
            "triton": triton_version,
        }
        print(f"{self._facts['device']}, torch {torch_version}, Triton {triton_version}")
        if machine.copied_bytes_per_s is not None and machine.matrix_flops_per_s is not None:
            self._facts["copied_tb_per_s"] = round(machine.copied_bytes_per_s / 1e12, 3)
            self._facts["matrix_tflop_per_s"] = round(machine.matrix_flops_per_s / 1e12, 1)
            copied, products = self._facts["copied_tb_per_s"], self._facts["matrix_tflop_per_s"]
            print(f"ceilings: copy {copied} TB/s, bf16 {products} TFLOP/s")
        print(f"{'kernel':18} {'case':38} {'error':>9} {'µs':>9} {'floor µs':>9} {'of floor':>8}  others")

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if row.is_wrong:
            self._problems.append(f"{row.kernel}, {row.case}: error {row.error}")
        error = "" if row.error is None else f"{row.error:.1e}" + ("!" if row.is_wrong else "")
        others = [f"{name} {_micros(seconds)}" for name, seconds in row.others.items()]
        ratio = "" if row.of_floor is None else f"{row.of_floor:.2f}"
        numbers = f"{error:>9} {_micros(row.time_s):>9} {_micros(row.floor_s):>9} {ratio:>8}"
        print(
            f"{row.kernel:18} {row.case:38} {numbers}  {', '.join([*others, row.note] if row.note else others)}",
            flush=True,
        )

    def failed(self, section: str, error: Exception) -> None:
        self._problems.append(f"{section}: {type(error).__name__}: {error}")
        print(f"{section} failed: {type(error).__name__}: {error}", flush=True)

    def left_out(self, section: str, reason: str) -> None:
        self._facts.setdefault("left_out", []).append(section)
        print(f"{section} is left out: {reason}", flush=True)

    @property
    def is_bad(self) -> bool:
        return bool(self._problems)

    def summary(self, took_s: float) -> dict[str, Any]:
        """Times over floors by row, and what was wrong."""
        ratios = {
            f"{row.kernel}, {row.case}": round(row.of_floor, 3)
            for row in self._rows
            if row.of_floor is not None and math.isfinite(row.of_floor)
        }
        checked = sum(row.error is not None for row in self._rows)
        notes = {f"{row.kernel}, {row.case}": row.note for row in self._rows if row.note}
        found = {"num_checked": checked, "wrong": self._problems, "time_over_floor": ratios, "notes": notes}
        return self._facts | found | {"took_s": round(took_s, 1)}


def _micros(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"
