"""How long a GPU has nothing to do between two decode steps, with the device replaced by a sleep.

A real engine decodes 1, 64 and 256 sequences of 1,024 tokens and more, on 64 adapters. All that its host does for a step
is done: plans, inputs, tables of adapters, choosing tokens, updates and their frames. Only the passes are a device's that
sleeps for as long as an 8B on an H100 should take, and small tensors of the host stand for the device's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import torch

from motet.benchmarks.gpu.engine_bench import RANK, TINY, Bench, Size
from motet.benchmarks.gpu.machine import Machine
from motet.benchmarks.rigs.sleeping_device import SleepingDevice, copied
from motet.kernels import joint_sampling
from motet.kernels.backend import plain_kernels
from motet.kernels.gpu.lora import TritonLora
from motet.workers.decoding import token_choice
from motet.workers.execution import inputs, runner
from motet.workers.wire.messages import AdapterRef, Frame, SamplingParams, SequenceRequest

PASS_S = {1: 6e-3, 64: 12e-3, 256: 18e-3}  # by sequences
CONTEXT, NUM_STEPS, NUM_ADAPTERS = 256, 80, 64
SIZE = Size(TINY | {"max_position_embeddings": 512}, 256, CONTEXT, NUM_STEPS, (NUM_ADAPTERS,), 384 << 20, 64 << 20)


@contextmanager
def sleeping(bench: Bench, device: SleepingDevice) -> Iterator[None]:
    """The bench's passes are the device's, and tokens are chosen as on a GPU."""
    fetched, vocab_size = joint_sampling._fetched, SIZE.config["vocab_size"]
    logits = torch.zeros(SIZE.num_sequences, vocab_size)  # type: ignore[arg-type]

    def forward(token_ids: torch.Tensor, attention: Any, lora: Any, segments: Any, sample_rows: Any) -> torch.Tensor:
        device.launch()
        return logits[: len(sample_rows)]

    def read(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        device.wait(device.mark())
        return fetched(parts)

    def sample(logits: torch.Tensor, plans: Any, kernels: Any, counts: Any) -> Any:
        return token_choice._sample_together(logits, plans, counts)

    with ExitStack() as stack:
        for where, name, to in (
            (bench.runner, "_forward", forward),
            (joint_sampling, "_fetched", read),
            (joint_sampling, "staged", copied),
            (inputs, "staged", copied),
            (runner, "sample", sample),
        ):
            stack.enter_context(mock.patch.object(where, name, to))
        yield


def idle_s(bench: Bench, device: SleepingDevice, num_sequences: int, seed: int, sampling: SamplingParams) -> list[float]:
    """Before each step in which all sequences decode, and have for some steps."""
    engine, encoder, rng = bench.engine, msgspec.msgpack.Encoder(), random.Random(seed)
    modules = dict.fromkeys(bench._layout.shape.modules, RANK)
    for index in range(num_sequences):
        engine.submit(
            SequenceRequest(
                sequence_id=index,
                prompt_token_ids=rng.choices(range(97), k=CONTEXT),
                sampling=sampling,
                tenant=f"round-{seed}",
                adapter=AdapterRef(str(index % NUM_ADAPTERS), modules),
            )
        )
    found, pass_s, device.pass_s = [], device.pass_s, 0.0
    while engine.has_work():
        before = len(device.idle_s)
        updates = engine.step()
        encoder.encode(Frame(updates, engine.load(), engine.take_residency_changes()))
        if len(updates) == num_sequences:
            found += device.idle_s[before:]
            device.pass_s = pass_s
    return found[4:-4]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each way (default 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lora = TritonLora()
    kernels = replace(plain_kernels(), lora=lora, capturable_lora=lora)
    bench = Bench(Machine(torch.device("cpu"), torch.float32, is_dry=True), SIZE, kernels)
    sampling = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0, ignore_eos=True)
    found: dict[int, list[float]] = {num: [] for num in PASS_S}
    for seed in range(arguments.rounds):
        for num_sequences, pass_s in PASS_S.items():
            device = SleepingDevice(pass_s)
            with sleeping(bench, device):
                found[num_sequences] += idle_s(bench, device, num_sequences, seed * 1000 + num_sequences, sampling)
    bench.engine.close()
    result: dict[str, object] = {"benchmark": "device_idle"}
    for num_sequences, times in found.items():
        print(f"{num_sequences:9} {statistics.median(times) * 1e3:8.2f} {statistics.mean(times) * 1e3:8.2f} {len(times)}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
