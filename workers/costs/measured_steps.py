"""Measures the steps of an engine on this machine, for a fit of their times (`step_costs.py`)."""

from __future__ import annotations

import itertools
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch

from ...adapters.adapter import EXPERT_MODULES, NARROW_MODULES, BaseShape
from ...adapters.format.content import AdapterContent, LoraMatrices
from ...adapters.format.tensor_file import BFLOAT16
from ...adapters.packing.layout import AdapterLayout
from ...adapters.store.store import AdapterStore
from ..engine import Engine
from ..execution.executor import Executor
from ..plan import StepPlan, StepResult
from ..wire.messages import AdapterRef, GangInfo
from .devices import Device
from .replay import Replayed, TracedRequest, replay
from .step_costs import StepCosts, StepShape, fit_line, fit_steps

# The limits of this machine's device, measured in a second or two: a large product and a large copy.

_REPETITIONS = 5
_SIDES = {"cuda": 8192, "cpu": 1024}  # of square matrices
_BANDWIDTH_BYTES = {"cuda": 1 << 31, "cpu": 1 << 28}


def measured_device(device: torch.device) -> Device:
    """Medians of a few repetitions, with as many threads as torch has. The network is not measured."""
    side = _SIDES[device.type]
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.ones(_BANDWIDTH_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = _seconds(lambda: torch.mm(a, b), device)
    copy_s = _seconds(lambda: target.copy_(source), device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, properties.total_memory
    else:
        name, memory_bytes = f"this machine, {torch.get_num_threads()} threads", psutil.virtual_memory().total
    return Device(name, 2 * side**3 / product_s, 2 * source.nbytes / copy_s, memory_bytes)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPETITIONS + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first allocates


RANKS = (8, 16, 32, 64)  # of the adapters that steps are measured with, in turn
_COPIED_BYTES = 64 << 20
# Requests at once, their prompts and answers, and how many adapters they have: 0 is the base.
_LOADS = (
    (1, 12, 6, 0),
    (2, 40, 4, 1),
    (3, 90, 6, 0),
    (6, 24, 5, 6),
    (6, 200, 4, 2),
    (9, 150, 4, 9),
    (12, 70, 5, 0),
    (12, 30, 5, 12),
    (20, 20, 5, 4),
    (20, 80, 4, 16),
    (24, 48, 5, 24),
    (32, 100, 5, 0),
    (40, 16, 5, 40),
    (48, 60, 4, 12),
)


@dataclass
class RecordingExecutor:
    """Passes plans on, and keeps what each took, and each load of an adapter.

    A step that begins while the engine is busy counts from the end of the one before it, so that what lies between
    two steps is in the costs.
    """

    inner: Executor
    clock: Callable[[], float] = time.perf_counter
    steps: list[tuple[StepShape, float]] = field(default_factory=list)
    loads: list[tuple[int, float]] = field(default_factory=list)  # pages, and seconds of those copied alone

    def __post_init__(self) -> None:
        self.feeds_tokens = self.inner.feeds_tokens
        self._step_starts: list[tuple[StepPlan, float]] = []
        self._ended_at: float | None = None
        self._loading: dict[str, tuple[int, float]] = {}

    def begin(self, plan: StepPlan) -> None:
        now = self.clock()
        self._step_starts.append((plan, now))
        for load in plan.loads:
            self._loading[load.residence.digest] = (len(load.residence.pages), time.perf_counter())
        self.inner.begin(plan)

    def finish(self) -> StepResult:
        result = self.inner.finish()
        now, (plan, begun_at) = self.clock(), self._step_starts.pop(0)
        if plan.sequences:
            self.steps.append((StepShape.of(plan), now - (begun_at if self._ended_at is None else self._ended_at)))
        self._ended_at = now if plan.sequences else None
        for digest in result.loaded:
            num_pages, since = self._loading.pop(digest)
            self.loads.append((num_pages, time.perf_counter() - since))
        return result

    def pause(self) -> None:
        """The engine has been idle since the last step."""
        self._ended_at = None

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None:
        self.inner.wake_on_copy_end(wake)

    def close(self) -> None:
        self.inner.close()


def random_adapters(store: AdapterStore, layout: AdapterLayout, count: int, first: int = 0) -> list[AdapterRef]:
    """Stores adapters of small random numbers, of `RANKS` in turn, on what graphs record but for experts."""
    return [_stored(store, layout, RANKS[number % len(RANKS)], number) for number in range(first, first + count)]


def _stored(store: AdapterStore, layout: AdapterLayout, rank: int, seed: int) -> AdapterRef:
    content = store.put(AdapterContent(_matrices(layout.shape, rank, np.random.default_rng(seed))), [layout])
    return AdapterRef(content.digest, content.module_ranks)


def _matrices(shape: BaseShape, rank: int, chance: np.random.Generator) -> dict[tuple[int, str], LoraMatrices]:
    matrices = {}
    for layer, (module, (num_in, num_out)) in itertools.product(range(shape.num_layers), shape.modules.items()):
        if module not in (*EXPERT_MODULES, *NARROW_MODULES) and shape.has(layer, module):
            a, b = (
                (0.01 * chance.standard_normal(size, dtype=np.float32)).astype(BFLOAT16)
                for size in ((rank, num_in), (num_out, rank))
            )
            matrices[layer, module] = LoraMatrices(a, b, 1.0)
    return matrices


def computing_s() -> float:
    """CPU seconds, so far, of the thread that computes the steps of this process's one engine; 0 before the first.

    With one thread it is the time that steps take on a machine that does nothing else, even if others keep it busy.
    """
    thread_ids = [thread.ident for thread in threading.enumerate() if thread.name.startswith("worker")]
    assert len(thread_ids) <= 1, "one engine"
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in thread_ids if ident is not None)


def wait_a_little(until_s: float) -> None:
    """For a millisecond, whatever clock that is of."""
    time.sleep(0.001)


def fitted_loads(num_adapters: int, max_model_len: int) -> Iterator[list[TracedRequest]]:
    """The loads that steps are fitted to. Adapters are named by their numbers.

    Prompts are no longer than half of the context.
    """
    longest = max_model_len // 2
    for seed, (number, prompt, answer, several) in enumerate(_LOADS):
        several = min(several, num_adapters)
        yield [
            TracedRequest(0.0, min(prompt, longest), answer, str((seed + index) % several) if several else None)
            for index in range(number)
        ]


def record_loads(
    engine: Engine, recording: RecordingExecutor, refs: Sequence[AdapterRef], first_id: int, rounds: int
) -> int:
    """Runs the loads that steps are fitted to; returns the next free id of a sequence.

    `refs`: adapters that are all in the pool, or come to be there. Raises ValueError if the engine refuses a request.
    """
    names: Mapping[str, AdapterRef] = {str(number): ref for number, ref in enumerate(refs)}
    for requests in [*fitted_loads(len(refs), engine.info.max_model_len)] * rounds:
        recording.pause()
        _served(replay(engine, requests, names, recording.clock, wait_a_little, first_id))
        first_id += len(requests)
    return first_id


def load_each(engine: Engine, recording: RecordingExecutor, refs: Sequence[AdapterRef], first_id: int) -> int:
    """Asks for each adapter alone, so that its load is measured alone; returns the next free id of a sequence."""
    for number, ref in enumerate(refs):
        recording.pause()
        request = TracedRequest(0.0, 2, 1, "one")
        _served(replay(engine, [request], {"one": ref}, recording.clock, wait_a_little, first_id + number))
    return first_id + len(refs)


def _served(stats: Replayed) -> None:
    if stats.refused:
        raise ValueError(f"steps cannot be measured: {next(iter(stats.refused))}")


def costs_of(recording: RecordingExecutor, info: GangInfo, model: Path) -> StepCosts:
    """A fit of what was recorded of an engine."""
    fit = fit_steps(recording.steps)
    store_load_s, store_page_s = fit_line(recording.loads)
    return StepCosts(
        model=model.name,
        machine=platform.node() or platform.machine(),
        device=info.device,
        num_threads=info.num_threads,
        dtype=info.dtype,
        coefficients=fit.coefficients,
        store_load_s=store_load_s,
        store_page_s=store_page_s,
        copy_page_s=_copy_s(info.page_bytes),
        residual=fit.residual,
        num_steps=len(recording.steps),
    )


def _copy_s(page_bytes: int) -> float:
    """Of a page, by the median of copies of many."""
    number = max(1, _COPIED_BYTES // page_bytes)
    source = np.ones(number * page_bytes, dtype=np.uint8)
    target, times = np.empty_like(source), list[float]()
    for _ in range(5):
        began_at = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began_at)
    return statistics.median(times) / number
