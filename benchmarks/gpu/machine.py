"""The measured limits of the machine, and timing of calls on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from motet.workers.costs.devices import Device

_REPLAYS = 20


@dataclass(frozen=True)
class Machine:
    """`is_dry`: Triton interprets on the CPU, shapes are tiny, nothing is timed."""

    device: torch.device
    dtype: torch.dtype
    is_dry: bool
    copied_bytes_per_s: float | None = None
    matrix_flops_per_s: float | None = None
    launch_s: float | None = None  # of a kernel with nothing to do, in a graph of such

    @staticmethod
    def find(is_dry: bool) -> Machine:
        """The first GPU and its limits, or a dry one."""
        if is_dry:
            return Machine(torch.device("cpu"), torch.float32, True)
        device = torch.device("cuda", 0)
        limits = _copied_bytes_per_s(device), _matrix_flops_per_s(device), _launch_s(device)
        torch.cuda.empty_cache()
        return Machine(device, torch.bfloat16, False, *limits)

    @property
    def limits(self) -> Device | None:
        """What was measured, for a `roofline`; None: nothing was."""
        if self.copied_bytes_per_s is None or self.matrix_flops_per_s is None or self.launch_s is None:
            return None
        memory_bytes = torch.cuda.get_device_properties(self.device).total_memory
        return Device(
            "measured", self.matrix_flops_per_s, self.copied_bytes_per_s, memory_bytes, launch_s=self.launch_s
        )

    def floor_s(self, num_bytes: float, flops: float = 0.0) -> float | None:
        """The least time possible: bytes over copy bandwidth or operations over matrix rate, whichever is more."""
        if self.copied_bytes_per_s is None or self.matrix_flops_per_s is None:
            return None
        return max(num_bytes / self.copied_bytes_per_s, flops / self.matrix_flops_per_s)

    def time_s(self, calls: Sequence[Callable[[], object]]) -> float | None:
        """Seconds of one call: the median over replays of a CUDA graph of all `calls`, divided by their number.

        The calls must use different memory, so that the cache does not serve them. Dry: only the first is made.
        """
        if self.is_dry:
            calls[0]()
            return None
        return _graph_time_s(calls)

    def eager_time_s(self, call: Callable[[], object], repetitions: int = 10) -> float | None:
        """Seconds of one call as Python launches it, the median; for what cannot be captured."""
        if self.is_dry:
            call()
            return None
        times = []
        for repetition in range(repetitions + 2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if repetition >= 2:
                times.append(time.perf_counter() - started)
        return float(statistics.median(times))


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in seconds; None: not timed."""

    kernel: str
    case: str
    error: float | None = None  # ‖out − reference‖ / ‖reference‖
    tolerance: float | None = None
    time_s: float | None = None
    floor_s: float | None = None
    others: dict[str, float] = field(default_factory=dict)  # seconds of other implementations
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.error is not None and self.tolerance is not None and not self.error <= self.tolerance

    @property
    def of_floor(self) -> float | None:
        """Time over floor: 1 is the machine's limit."""
        return None if self.time_s is None or not self.floor_s else self.time_s / self.floor_s

    @property
    def record(self) -> dict[str, Any]:
        return {"kind": "row", **asdict(self), "of_floor": self.of_floor, "is_wrong": self.is_wrong}


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """‖actual − reference‖ / ‖reference‖ in float64; NaN if any element is NaN."""
    reference = reference.double()
    return float((actual.double() - reference).norm() / reference.norm().clamp_min(1e-300))


def _graph_time_s(calls: Sequence[Callable[[], object]]) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    return float(statistics.median(times))


def _copied_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second of a large copy."""
    source = torch.randn(1 << 30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _graph_time_s([lambda: target.copy_(source)])


def _matrix_flops_per_s(device: torch.device) -> float:
    """Of a large product of random bfloat16 matrices."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * 8192**3 / _graph_time_s([lambda: torch.mm(a, b, out=out)])


def _launch_s(device: torch.device) -> float:
    """Of a kernel that adds to one number, in a graph of many."""
    number = torch.zeros(1, device=device)
    return _graph_time_s([lambda: number.add_(1.0)] * 1000)
