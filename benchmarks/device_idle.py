"""How long a GPU has nothing to do between two decode steps, with the device replaced by a sleep.

A real engine decodes 1, 64 and 256 sequences, each on one of 64 adapters. All that the host does for a step is done:
plans, inputs, tables of adapters, choices of tokens, updates and their frames. Only the passes are a device's that
sleeps for as long as an 8B on an H100 should take, and small tensors of the host stand for the device's.

"Waiting" lays out each step's tensors anew once the tokens of the step before are known, as a CPU's worker does. "Fed"
is what a GPU's worker does: tables of pages and tokens stay on the device, and a step is launched while the one before
it runs. Both take turns, in one process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from unittest import mock

import msgspec
import torch

from motet.benchmarks.gpu.engine_bench import RANK, TINY, Bench, Size
from motet.benchmarks.gpu.machine import Machine
from motet.benchmarks.rigs.sleeping_device import Replays, SleepingDevice, copied, late_arriving
from motet.kernels import joint_sampling
from motet.kernels.backend import plain_kernels
from motet.kernels.gpu.lora import TritonLora
from motet.workers.decoding.token_choice import begin_sample, sampled
from motet.workers.execution import device_rows, runner
from motet.workers.execution import device_rows as device_rows_module
from motet.workers.execution.executor import FeedingExecutor, LocalExecutor
from motet.workers.wire.messages import AdapterRef, Frame, SamplingParams, SequenceRequest, Submit

Way = Literal["waiting", "fed"]
PASS_S = {1: 6e-3, 64: 12e-3, 256: 18e-3}  # by sequences
CONTEXT, NUM_STEPS, NUM_ADAPTERS, VOCAB_SIZE = 256, 80, 64, 97
SIZE = Size(TINY | {"max_position_embeddings": 512}, 256, CONTEXT, NUM_STEPS, (NUM_ADAPTERS,), 384 << 20, 64 << 20)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9},
    "penalised": {"temperature": 0.8, "seed": 1, "frequency_penalty": 0.5, "num_logprobs": 2},
}


class Step(NamedTuple):
    idle_s: float  # of the device, before it
    cpu_s: float  # of the host, in all threads; time beyond the pass leaves the device idle


@dataclass
class Host:
    """An engine whose passes are a sleeping device's."""

    way: Way
    bench: Bench
    device: SleepingDevice

    @staticmethod
    def make(way: Way, device: SleepingDevice) -> Host:
        lora = TritonLora()
        kernels = replace(plain_kernels(), lora=lora, capturable_lora=lora)
        bench = Bench(Machine(torch.device("cpu"), torch.float32, is_dry=True), SIZE, kernels)
        if way == "fed":
            logits = torch.zeros(SIZE.num_sequences, VOCAB_SIZE)
            bench.runner.keep_tables(SIZE.num_sequences, 512)
            bench.runner.record_decodes(SIZE.max_tokens, lambda compute: Replays(device, logits))
            old = bench.engine.executor
            assert isinstance(old, LocalExecutor)
            bench.engine.executor = FeedingExecutor(
                bench.runner, old.loader, old.mover, "", old.num_threads, old.device
            )
        return Host(way, bench, device)

    def steps(self, num_sequences: int, seed: int, sampling: SamplingParams) -> list[Step]:
        """Those in which all sequences decode, but for the first and the last ones."""
        engine, encoder, rng = self.bench.engine, msgspec.msgpack.Encoder(), random.Random(seed)
        modules = dict.fromkeys(self.bench._layout.shape.modules, RANK)
        for index in range(num_sequences):
            engine.receive(
                Submit(
                    SequenceRequest(
                        sequence_id=index,
                        prompt_token_ids=rng.choices(range(VOCAB_SIZE), k=CONTEXT),
                        sampling=sampling,
                        tenant=f"round-{seed}",
                        adapter=AdapterRef(str(index % NUM_ADAPTERS), modules),
                    )
                )
            )
        found: list[Step] = []
        pass_s, self.device.pass_s = PASS_S[num_sequences], 0.0
        while engine.has_work():
            num_passes, cpu_s = len(self.device.idle_s), time.process_time()
            updates = engine.step()
            encoder.encode(Frame(updates, engine.load(), engine.take_residency_changes()))
            if len(updates) == num_sequences:
                idle_s = sum(self.device.idle_s[num_passes:])
                found.append(Step(idle_s, time.process_time() - cpu_s))
                self.device.pass_s = pass_s
        return found[6:-6]


@contextmanager
def sleeping(host: Host) -> Iterator[None]:
    """The host's passes are its device's, and tokens are chosen as on a GPU."""
    device, logits = host.device, torch.zeros(SIZE.num_sequences, VOCAB_SIZE)

    def forward(token_ids: torch.Tensor, attention: Any, adapters: Any, sample_rows: Any) -> torch.Tensor:
        device.launch()
        return logits[: len(token_ids if sample_rows is None else sample_rows)]

    def sample(logits: torch.Tensor, plans: Any, kernels: Any, counts: Any) -> Any:
        return sampled(begin_sample(logits, plans, counts).read())

    with ExitStack() as stack:
        for where, name, to in (
            (host.bench.runner, "_forward", forward),
            (joint_sampling, "Arriving", late_arriving(device)),
            (joint_sampling, "staged", copied),
            (device_rows_module, "staged", copied),
            (device_rows, "staged", copied),
            (runner, "sample", sample),
        ):
            stack.enter_context(mock.patch.object(where, name, to))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--sampling", choices=[*SAMPLINGS], default="greedy", help="(default greedy)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sampling = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True, **SAMPLINGS[arguments.sampling])
    hosts = [Host.make(way, SleepingDevice(0.0)) for way in ("waiting", "fed")]
    found: dict[tuple[int, Way], list[Step]] = {(num, host.way): [] for num in PASS_S for host in hosts}
    for seed in range(arguments.rounds):
        for num_sequences in PASS_S:
            for host in hosts:
                with sleeping(host):
                    steps = host.steps(num_sequences, seed * 1000 + num_sequences, sampling)
                found[num_sequences, host.way] += steps
    for host in hosts:
        host.bench.engine.close()
    result: dict[str, object] = {"benchmark": "device_idle", "sampling": arguments.sampling}
    print(f"{'sequences':>9} {'way':>8} {'median idle ms':>15} {'p90':>7} {'CPU ms':>7} {'steps':>6}")
    for (num_sequences, way), steps in found.items():
        idle_ms, cpu_ms = ([step[part] * 1e3 for step in steps] for part in (0, 1))
        median, cpu = statistics.median(idle_ms), statistics.median(cpu_ms)
        p90 = statistics.quantiles(idle_ms, n=10)[8]
        print(f"{num_sequences:9} {way:>8} {median:15.2f} {p90:7.2f} {cpu:7.2f} {len(steps):6}")
        result[f"idle_ms_{num_sequences}_{way}"] = round(median, 3)
        result[f"cpu_ms_{num_sequences}_{way}"] = round(cpu, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
