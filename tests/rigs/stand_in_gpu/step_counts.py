"""What a decode step of Llama-3-8B asks of a GPU, by count: `python -m motet.tests.rigs.stand_in_gpu.step_counts`.

64 sequences of 1,024 tokens and more decode on a stand-in, without adapters and with 64. Models of 1 and 2 layers of
that shape, in which only the widths are smaller, give what each layer adds: counts depend on no width. One of 4 layers
must lie on the same line. Triton's kernels are counted and not computed.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any
from unittest import mock

import pytest
import torch

from motet.benchmarks.gpu.engine_bench import TINY, Bench, Size
from motet.benchmarks.gpu.machine import Machine
from motet.kernels.backend import triton_kernels
from motet.tests.rigs.stand_in_gpu import capture, operations
from motet.tests.rigs.stand_in_gpu.capture import Capture
from motet.tests.rigs.stand_in_gpu.stand_in_gpu import StandInGpu, stand_in_gpu
from motet.workers.scheduling.tier_traffic import TierTraffic

LAYERS = 32
NUM_SEQUENCES, CONTEXT, NUM_STEPS = 64, 1024, 64
MEASURED = 16  # steps: each sequence gets a new page in one of them


@dataclass(frozen=True)
class Counts:
    """Of one decode step, in the thread that computes; means over `MEASURED` steps."""

    launches: float  # by the host, graphs counted as one
    graph_nodes: float  # operations and kernels within the graph
    copies_to_device: float
    bytes_to_device: float
    copies_to_host: float
    bytes_to_host: float
    waits: float

    def at(self, layers: int, other: Counts, of: int, other_of: int) -> Counts:
        """These are of a model with `of` layers, `other` of one with `other_of`; what it is with so many."""

        def line(a: float, b: float) -> float:
            return a + (b - a) / (other_of - of) * (layers - of)

        ours, theirs = asdict(self), asdict(other)
        return Counts(**{each.name: round(line(ours[each.name], theirs[each.name]), 2) for each in fields(self)})


class Counter:
    """Counts what the computing thread launches."""

    def __init__(self, gpu: StandInGpu) -> None:
        self.gpu, self.launches, self.nodes = gpu, 0, 0

    def start(self) -> None:
        self.gpu.tally.clear()
        self.launches = self.nodes = 0

    def counts(self, num_steps: int) -> Counts:
        copies = self.gpu.tally.copies_of("worker")
        to_device = [copy.num_bytes for copy in copies if copy.kind == "to device"]
        to_host = [copy.num_bytes for copy in copies if copy.kind == "to host"]
        numbers = (
            *(self.launches, self.nodes, len(to_device), sum(to_device), len(to_host), sum(to_host)),
            len(self.gpu.tally.waits_of("worker")),
        )
        return Counts(*(round(number / num_steps, 2) for number in numbers))


def _is_computing() -> bool:
    return threading.current_thread().name.startswith("worker")


@contextmanager
def counted(gpu: StandInGpu) -> Iterator[Counter]:
    """Kernels of Triton's are launched and write nothing; memory that nobody has written holds zeros, so that logits
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
        mock.patch.object(TierTraffic, "plan_moves", return_value=()),  # those are other threads'
    ):
        yield counter


class Measured(Exception):  # noqa: N818
    """The steps that count are over."""


def count(num_layers: int, num_adapters: int) -> Counts:
    config = TINY | {"num_hidden_layers": num_layers, "max_position_embeddings": 2048}
    size = Size(config, NUM_SEQUENCES, CONTEXT, NUM_STEPS, (num_adapters,), 256 << 20, 64 << 20)
    with stand_in_gpu() as gpu, counted(gpu) as counter:
        device = torch.device("cuda", 0)
        bench = Bench(Machine(device, torch.float32, is_dry=False), size, triton_kernels(device, torch.float32))
        step, decodes = bench.engine.step, 0

        def watched() -> Any:
            nonlocal decodes
            updates = step()
            if len(updates) == NUM_SEQUENCES:
                decodes += 1
                if decodes == 4:
                    counter.start()
                elif decodes == 4 + MEASURED:
                    raise Measured
            return updates

        with mock.patch.object(bench.engine, "step", watched), pytest.raises(Measured):
            bench.serve(num_adapters)
        counts = counter.counts(MEASURED)
        bench.engine.close()
        gpu.problems.clear()  # kernels that compute nothing write nothing either
        del bench
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--adapters", type=int, nargs="*", default=[0, 64], help="(default 0 64)")
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    for num_adapters in arguments.adapters:
        found = {num: count(num, num_adapters) for num in (1, 2, 4)}
        for num, counts in found.items():
            print(f"{num_adapters} adapters, {num} layers: {counts}", flush=True)
        if found[4] != found[1].at(4, found[2], 1, 2):
            raise RuntimeError("each layer does not add the same")
        result[f"{num_adapters}_adapters"] = asdict(found[1].at(LAYERS, found[2], 1, 2))
    print(json.dumps({"benchmark": "step_counts", "layers": LAYERS, **result}))


if __name__ == "__main__":
    main()
