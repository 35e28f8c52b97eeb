"""What a decode step of Llama-3-8B asks of a GPU, by count: `python -m motet.tests.rigs.stand_in_gpu.step_counts`.

64 sequences of 1,024 tokens and more decode on a stand-in, without adapters and with 64. Models of 1 and 2 layers of
that shape, in which only the widths are smaller, give what each layer adds; one of 4 layers must lie on the same line,
and one of other widths must be counted alike. Triton's kernels are counted and not computed.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any
from unittest import mock

import torch

from motet.benchmarks.gpu import engine_bench
from motet.benchmarks.gpu.engine_bench import TINY, Bench, Size
from motet.benchmarks.gpu.machine import Machine
from motet.kernels.backend import triton_kernels
from motet.tests.rigs.stand_in_gpu import capture, operations
from motet.tests.rigs.stand_in_gpu.capture import Capture
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu, stand_in_gpu
from motet.workers.plan import StepPlan
from motet.workers.scheduling.tier_traffic import TierSizes

LAYERS = 32
FIRST, MEASURED = 4, 16  # decode steps: in so many each sequence gets one new page
OTHER_WIDTHS = {"vocab_size": 211, "hidden_size": 128, "intermediate_size": 160}


@dataclass(frozen=True)
class Load:
    num_sequences: int = 64
    context: int = 1024
    num_steps: int = 64  # in the last 32 of them all decode: prompts take as many
    max_tokens: int = 2048  # of a step
    pool_bytes: int = 256 << 20


@dataclass(frozen=True)
class Counts:
    """Of `MEASURED` decode steps, in the thread that computes."""

    launches: int  # by the host: operations, kernels, copies; a graph is one
    within_the_graph: int  # operations and kernels
    copies_to_device: int
    bytes_to_device: int
    copies_to_host: int
    bytes_to_host: int
    waits: int
    idle_waits: int  # of these, such as leave the device without work

    def a_step(self) -> dict[str, float]:
        return {name: number / MEASURED for name, number in asdict(self).items()}


def at_layers(layers: int, one: Counts, two: Counts) -> Counts:
    """Those of a model with so many layers, on the line through models of 1 and 2."""
    return Counts(*(a + (b - a) * (layers - 1) for a, b in zip(astuple(one), astuple(two), strict=True)))


class Counter:
    """Counts what the computing thread does from one of its steps to another."""

    def __init__(self, gpu: StandInGpu) -> None:
        self.gpu, self.launches, self.nodes, self.decodes = gpu, 0, 0, 0
        self.counts: Counts | None = None

    def begin(self, is_counted: bool) -> None:
        """The computing thread, which does one thing after the other, begins a step; True: all sequences decode."""
        self.decodes += is_counted
        if self.decodes == FIRST:
            self.gpu.tally.clear()
            self.launches = self.nodes = 0
        elif self.decodes == FIRST + MEASURED:
            self.counts = self.counts or self._counted()

    def _counted(self) -> Counts:
        copies, waits = self.gpu.tally.copies_of("worker"), self.gpu.tally.waits_of("worker")
        to_device = [copy.num_bytes for copy in copies if copy.kind == "to device"]
        to_host = [copy.num_bytes for copy in copies if copy.kind == "to host"]
        return Counts(
            *(self.launches, self.nodes, len(to_device), sum(to_device), len(to_host), sum(to_host)),
            *(len(waits), sum(wait.leaves_idle for wait in waits)),
        )


def _is_computing() -> bool:
    return threading.current_thread().name.startswith("worker")


@contextmanager
def counted(gpu: StandInGpu) -> Iterator[Counter]:
    """Kernels of Triton's are launched and write nothing; unwritten memory holds zeros, so that logits
    are finite."""
    import triton.runtime.jit as jit

    counter = Counter(gpu)
    launch, record, replayed = gpu.operations.launch, Capture.record, Capture.replay

    def launched(name: str) -> Any:
        counter.launches += _is_computing()
        return launch(name)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if gpu.captures.current is None:
            gpu.operations.launch(kernel.fn.__name__)
        else:
            gpu.captures.current.recorded.append(lambda work: None)

    def noted(graph: Capture, work: Any) -> None:
        counter.nodes += len(graph.recorded) * _is_computing()
        replayed(graph, work)

    def recorded(graph: Capture, compute: Any, out: Any, uses: Any) -> None:
        if compute.name not in operations.EMPTY:
            record(graph, compute, out, uses)

    with (
        mock.patch.object(gpu.operations, "launch", launched),
        mock.patch.object(Capture, "record", recorded),
        mock.patch.object(jit.JITFunction, "run", run),
        mock.patch.object(Capture, "replay", noted),
        mock.patch.object(operations, "poison", lambda tensor: tensor.zero_()),
        mock.patch.object(capture, "poison", lambda tensor: tensor.zero_()),
        mock.patch.object(engine_bench, "TierSizes", return_value=TierSizes()),  # copies of KV are other threads'
    ):
        yield counter


def count(
    num_layers: int, num_adapters: int, widths: Mapping[str, Any] | None = None, load: Load | None = None
) -> Counts:
    load = load or Load()
    longest = 2 * (load.context + load.num_steps)
    config = TINY | {"num_hidden_layers": num_layers, "max_position_embeddings": longest} | dict(widths or {})
    sizes = load.num_sequences, load.context, load.num_steps, (num_adapters,)
    size = Size(config, *sizes, load.pool_bytes, load.pool_bytes // 4, max_tokens=load.max_tokens)
    with stand_in_gpu() as gpu, counted(gpu) as counter:
        device = torch.device("cuda", 0)
        kernels = replace(triton_kernels(device, torch.float32), compiles=False)  # they are not compiled here
        bench = Bench(Machine(device, torch.float32, is_dry=False), size, kernels)

        def watched(compute: Callable[..., Any]) -> Callable[..., Any]:
            def step(plan: StepPlan, *rest: Any) -> Any:
                num_decodes = sum(s.sample is not None and len(s.token_ids) == 1 for s in plan.sequences)
                counter.begin(num_decodes == load.num_sequences)
                return compute(plan, *rest)

            return step

        for name in ("run", "begin"):
            setattr(bench.runner, name, watched(getattr(bench.runner, name)))
        bench.serve(num_adapters)
        bench.engine.close()
        gpu.problems.clear()  # kernels that compute nothing write nothing either
        del bench
    assert counter.counts is not None, f"no {FIRST + MEASURED} steps in which all decode"
    return counter.counts


def counts_of_llama(num_adapters: int) -> Counts:
    """Raises RuntimeError if counts do not grow by the layer alone."""
    found = {layers: count(layers, num_adapters) for layers in (1, 2, 4)}
    if found[4] != at_layers(4, found[1], found[2]):
        raise RuntimeError(f"4 layers are not on the line through 1 and 2: {found}")
    if (other := count(1, num_adapters, OTHER_WIDTHS)) != found[1]:
        raise RuntimeError(f"counts depend on widths: {other} in place of {found[1]}")
    return at_layers(LAYERS, found[1], found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, nargs="*", default=[0, 64], help="(default 0 64)")
    result: dict[str, object] = {}
    for num_adapters in parser.parse_args().adapters:
        counts = counts_of_llama(num_adapters).a_step()
        result[f"{num_adapters}_adapters"] = counts
        print(f"{num_adapters} adapters, a step: " + ", ".join(f"{name} {number:g}" for name, number in counts.items()))
    print(json.dumps({"benchmark": "step_counts", "layers": LAYERS, **result}))


if __name__ == "__main__":
    main()
