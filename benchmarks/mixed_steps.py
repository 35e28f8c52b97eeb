"""How long a GPU waits for its host in steps with a prompt, with the device replaced by a sleep.

64 sequences decode, and in each step another prompt is computed beside them. All that the host does is done: plans,
inputs, tables, the model's code of 32 layers, the host side of Triton's kernels. The driver is not there: a launch of
Triton's and a replay of a graph take a stated time of the host's, and the device sleeps for as long as an 8B on an H100
should take. torch's own operations run on small tensors of the host.

"Launched" is kernel by kernel, "recorded" is with `MixedGraphs`. Both take turns, in one process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from motet.benchmarks.gpu.engine_bench import RANK, TINY, Bench, Size
from motet.benchmarks.gpu.machine import Machine
from motet.benchmarks.rigs.sleeping_device import SleepingDevice, copied, late_arriving
from motet.kernels import joint_sampling
from motet.kernels.backend import triton_kernels
from motet.workers.execution import device_rows
from motet.workers.execution.executor import FeedingExecutor, LocalExecutor
from motet.workers.execution.graphs import Between, Compute
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, Submit

Way = Literal["launched", "recorded"]
REPLAY_S = 15e-6  # of the host: of a graph of some ten kernels
PASS_S = {64: 9e-3, 192: 11e-3, 448: 16e-3}  # by tokens of the prompt
NUM_SEQUENCES, NUM_STEPS, CONTEXT, VOCAB_SIZE = 64, 24, 256, 97
CONFIG = TINY | {"max_position_embeddings": 512, "num_hidden_layers": 32}
SIZE = Size(CONFIG, NUM_SEQUENCES + 2, CONTEXT, NUM_STEPS, (NUM_SEQUENCES,), 768 << 20, 256 << 20)


def spin(seconds: float) -> None:
    """Keeps the interpreter, as launches do, for so much of this thread's time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@dataclass(frozen=True)
class Replayed:
    """In place of CUDA graphs: `graphs.Recording`."""

    betweens: list[Between]
    output: torch.Tensor

    @staticmethod
    def record(compute: Compute) -> Replayed:
        betweens: list[Between] = []
        return Replayed(betweens, compute(betweens.append))

    def replay(self) -> torch.Tensor:
        for between in self.betweens:
            spin(REPLAY_S)
            between()
        spin(REPLAY_S)
        return self.output


class Host:
    """An engine whose steps a sleeping device computes."""

    def __init__(self, way: Way, device: SleepingDevice, num_adapters: int) -> None:
        kernels = replace(triton_kernels(torch.device("cpu"), torch.float32), linear=zeros)
        self.bench = bench = Bench(Machine(torch.device("cpu"), torch.float32, is_dry=True), SIZE, kernels)
        self.way, self.device, self._num_adapters, self._num_requested = way, device, num_adapters, 0
        bench.runner.keep_tables(SIZE.num_sequences, 512)
        bench.runner.record_decodes(SIZE.max_tokens, Replayed.record)
        if way == "recorded":
            bench.runner.record_mixed(SIZE.max_tokens, Replayed.record)
        old = bench.engine.executor
        assert isinstance(old, LocalExecutor)
        bench.engine.executor = FeedingExecutor(bench.runner, old.loader, old.mover, "", old.num_threads, old.device)

    def ask(self, num_prompt_tokens: int, num_tokens: int) -> None:
        modules = dict.fromkeys(self.bench._layout.shape.modules, RANK)
        adapter = AdapterRef(str(self._num_requested % self._num_adapters), modules) if self._num_adapters else None
        self.bench.engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=self._num_requested,
                    prompt_token_ids=random.Random(self._num_requested).choices(range(VOCAB_SIZE), k=num_prompt_tokens),
                    sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
                    tenant="one",
                    adapter=adapter,
                )
            )
        )
        self._num_requested += 1

    def steps(self, num_prompt_tokens: int) -> list[tuple[float, float]]:
        """Of each step with a prompt of so many tokens: for how long the device idled, and the host's CPU time."""
        engine, device, found = self.bench.engine, self.device, list[tuple[float, float]]()
        device.pass_s = 0.0
        for num_prompt, num_tokens in ((1, 1), (CONTEXT - NUM_STEPS, 3 * NUM_STEPS)):  # the first have adapters loaded
            self.run()
            for _ in range(NUM_SEQUENCES):
                self.ask(num_prompt, num_tokens)
        while len(engine.step()) < NUM_SEQUENCES:
            if not engine.has_work():
                raise RuntimeError(f"{NUM_SEQUENCES} sequences have never decoded in one step")
        device.pass_s = PASS_S[num_prompt_tokens]
        for _ in range(NUM_STEPS):
            self.ask(num_prompt_tokens, 1)
            num_passes, cpu_s = len(device.idle_s), time.process_time()
            num_reported = len(engine.step())
            if num_reported == NUM_SEQUENCES + 1:
                found.append((sum(device.idle_s[num_passes:]), time.process_time() - cpu_s))
        device.pass_s = 0.0
        self.run()
        return found[4:]

    def run(self) -> None:
        """Until nothing is requested any more."""
        while self.bench.engine.has_work():
            self.bench.engine.step()


def launches_of(seconds: float) -> Callable[..., None]:
    """In place of `JITFunction.run`: takes so much of the host's time."""
    return (lambda *_, **__: spin(seconds)) if seconds else (lambda *_, **__: None)


def zeros(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product that launches and computes nothing."""
    return torch.zeros((len(x), len(weight)))


def without_a_driver(stack: ExitStack, device: SleepingDevice, hosts: list[Host]) -> None:
    """Kernels compute nothing, a step is the device's pass, and tokens arrive when it has ended."""

    def launching(compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(inputs: Any) -> Any:
            began_s = time.perf_counter()
            out = compute(inputs)
            device.launch(began_s)
            return out

        return timed

    for where, name, to in (
        (joint_sampling, "Arriving", late_arriving(device)),
        (joint_sampling, "staged", copied),
        (device_rows, "staged", copied),
        *((host.bench.runner, "_launch", launching(host.bench.runner._launch)) for host in hosts),
    ):
        stack.enter_context(mock.patch.object(where, name, to))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default 3)")
    parser.add_argument(
        "--launch-us",
        type=float,
        default=15.0,
        help="what a launch of Triton's takes of the host, arguments included (default 15; 0: motet's own code alone)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {"benchmark": "mixed_steps"}
    print(f"{'prompt':>6} {'adapters':>8} {'way':>9} {'median idle ms':>15} {'CPU ms':>7} {'steps':>6}")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", launches_of(arguments.launch_us * 1e-6)))
        for num_adapters in (0, NUM_SEQUENCES):
            device = SleepingDevice(0.0)
            ways: tuple[Way, ...] = ("launched", "recorded")
            hosts = [Host(way, device, num_adapters) for way in ways]
            found: dict[tuple[int, Way], list[tuple[float, float]]] = {}
            with ExitStack() as patches:
                without_a_driver(patches, device, hosts)
                for _ in range(arguments.rounds):
                    for num_prompt_tokens in PASS_S:
                        for host in hosts:
                            found.setdefault((num_prompt_tokens, host.way), []).extend(host.steps(num_prompt_tokens))
            for host in hosts:
                host.bench.engine.close()
            for (num_prompt_tokens, way), steps in found.items():
                idle_ms, cpu_ms = (statistics.median(step[part] * 1e3 for step in steps) for part in (0, 1))
                print(f"{num_prompt_tokens:6} {num_adapters:8} {way:>9} {idle_ms:15.2f} {cpu_ms:7.2f} {len(steps):6}")
                name = f"{num_prompt_tokens}_{num_adapters}_{way}"
                result |= {f"idle_ms_{name}": round(idle_ms, 3), f"cpu_ms_{name}": round(cpu_ms, 3)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
