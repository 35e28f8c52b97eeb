"""Time to send a plan to all workers of a gang and to receive their results, while no worker computes anything.

Workers are processes. They decode a plan, and answer at once with its tokens (the first worker) or an empty result,
over the channel that real workers use. Each plan of sequences with long contexts, which get a page in each 16th step,
is also sent with whole page tables, as a baseline. The baseline of the channel sends a plan of 64 sequences with
adapters by Ray actor calls, one to each worker in each step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import ray

from motet.workers.execution.gang_executor import (
    Connection,
    ConnectionLostError,
    DeltaDecoder,
    DeltaEncoder,
    Done,
    Execute,
    GangExecutor,
    ToWorker,
)
from motet.workers.plan import Residence, SampledToken, SamplePlan, SequencePlan, StepPlan, StepResult, packed
from motet.workers.wire.messages import SamplingParams

NUM_SEQUENCES = 64
BLOCK_SIZE = 16
CONTEXTS = ((256, 32 * 1024), (64, 8 * 1024))  # sequences, tokens of each


class WholePlans(DeltaEncoder):
    """The baseline: each plan has all pages of its sequences."""

    def encode(self, plan: StepPlan) -> Execute:
        return Execute(plan, b"")


def whole_plan(message: Execute) -> StepPlan:
    return message.plan


class Decoding:
    """Plans of sequences that decode, without adapters; one in `BLOCK_SIZE` of them gets a page in a step."""

    def __init__(self, num_sequences: int, context: int) -> None:
        num_pages = context // BLOCK_SIZE
        self._tables = [packed(range(i * num_pages, (i + 1) * num_pages)) for i in range(num_sequences)]
        self._context, self._step, self._params = context, 0, SamplingParams(max_tokens=4096)

    def next(self) -> StepPlan:
        parts = []
        for i in range(len(self._tables)):
            if (self._step + i) % BLOCK_SIZE == 0:
                self._tables[i] += packed([1_000_000 + self._step])
            position = self._context + self._step + i % BLOCK_SIZE
            sample = SamplePlan(self._params, (1 << 62) + i, 100 + self._step)
            parts.append(SequencePlan(i, (7,), position, self._tables[i], None, sample))
        self._step += 1
        return StepPlan(self._step, tuple(parts), (), ())


def make_plan(step: int) -> StepPlan:
    """A step of steady decode: 64 sequences of about 300 tokens, each with an adapter of its own."""
    sample = SamplePlan(SamplingParams(max_tokens=100), 1, step)
    digests = [f"{i:064x}" for i in range(NUM_SEQUENCES)]
    sequences = tuple(
        SequencePlan(i, (7,), 300 + step, packed(range(i * 20, i * 20 + 20)), digests[i], sample)
        for i in range(NUM_SEQUENCES)
    )
    adapters = tuple(Residence(d, {"q_proj": 16, "v_proj": 16}, tuple(range(14))) for d in digests)
    return StepPlan(step, sequences, adapters, ())


def result_of(plan: StepPlan, rank: int) -> dict[int, SampledToken | None]:
    return {s.sequence_id: SampledToken(7, None) for s in plan.sequences} if rank == 0 else {}


def stand_in(port: int, rank: int) -> None:
    """A worker that computes nothing."""
    connection = Connection(socket.create_connection(("127.0.0.1", port)))
    connection.send(msgspec.msgpack.encode(rank))
    decoder, deltas = msgspec.msgpack.Decoder(ToWorker), DeltaDecoder()
    try:
        while isinstance(message := decoder.decode(connection.receive()), Execute):
            plan = deltas.decode(message) if message.num_kept_pages else whole_plan(message)
            connection.send(msgspec.msgpack.encode(Done(plan.step, result_of(plan, rank))))
    except ConnectionLostError:
        pass  # the benchmark is over


class RayWorker:
    """The baseline's worker."""

    def execute(self, plan: StepPlan, rank: int) -> dict[int, SampledToken | None]:
        return result_of(plan, rank)


def timed_ms(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) * 1e3


def measure(execute: Callable[[StepPlan], object], num_steps: int) -> list[float]:
    """Milliseconds of each step, without the first tenth of the steps."""
    times = []
    for step in range(num_steps):
        plan = make_plan(step)
        times.append(timed_ms(lambda: execute(plan)))  # noqa: B023 (called at once)
    return times[num_steps // 10 :]


@contextmanager
def gang(degree: int) -> Iterator[GangExecutor]:
    """An executor with so many workers that compute nothing."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        processes = [context.Process(target=stand_in, args=(port, rank), daemon=True) for rank in range(degree)]
        for process in processes:
            process.start()
        accepted = [Connection(listener.accept()[0]) for _ in processes]
    by_rank = {msgspec.msgpack.decode(connection.receive()): connection for connection in accepted}
    executor = GangExecutor([by_rank[rank] for rank in range(degree)], None, step_deadline_s=30.0)
    yield executor
    executor.close()
    for process in processes:
        process.join()


def over_channel(degree: int, num_steps: int) -> list[float]:
    with gang(degree) as executor:

        def execute(plan: StepPlan) -> StepResult:
            executor.begin(plan)
            return executor.finish()

        return measure(execute, num_steps)


def over_actors(degree: int, num_steps: int) -> list[float]:
    ray.init(address="local", num_cpus=degree, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor: Any = ray.remote(RayWorker)
    workers = [actor.options(num_cpus=1).remote() for _ in range(degree)]

    def execute(plan: StepPlan) -> object:
        return ray.get([worker.execute.remote(plan, rank) for rank, worker in enumerate(workers)])

    times = measure(execute, num_steps)
    ray.shutdown()
    return times


def coding(num_sequences: int, context: int, num_steps: int) -> dict[str, tuple[float, float]]:
    """By way: bytes of a step's message, and milliseconds to make and to read it, the mean of whole rounds of pages."""
    plans, encoder = Decoding(num_sequences, context), msgspec.msgpack.Encoder()
    decoder = msgspec.msgpack.Decoder(Execute)
    ways: dict[str, tuple[DeltaEncoder, Callable[[Execute], StepPlan]]] = {
        "whole tables": (WholePlans(), whole_plan),
        "new pages": (DeltaEncoder(), DeltaDecoder().decode),
    }
    num_bytes: dict[str, list[int]] = {way: [] for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(num_steps + BLOCK_SIZE):
        plan = plans.next()
        for way, (deltas, decode) in ways.items():
            began_s = time.perf_counter()
            message = encoder.encode(deltas.encode(plan))
            assert decode(decoder.decode(message)).step == plan.step
            if step >= BLOCK_SIZE:
                times[way].append((time.perf_counter() - began_s) * 1e3)
                num_bytes[way].append(len(message))
    return {way: (statistics.fmean(num_bytes[way]), statistics.median(times[way])) for way in ways}


def there_and_back(num_sequences: int, context: int, degree: int, num_steps: int) -> dict[str, float]:
    """By way: milliseconds of a step over the channel, the median."""
    plans = Decoding(num_sequences, context)
    encoders = {"whole tables": WholePlans(), "new pages": DeltaEncoder()}
    times: dict[str, list[float]] = {way: [] for way in encoders}
    with gang(degree) as executor:

        def execute(plan: StepPlan) -> StepResult:
            executor.begin(plan)
            return executor.finish()

        for step in range(num_steps + BLOCK_SIZE):
            plan = plans.next()
            for way, encoder in encoders.items():
                executor._deltas = encoder
                took_ms = timed_ms(lambda: execute(plan))  # noqa: B023 (called at once)
                if step >= BLOCK_SIZE:
                    times[way].append(took_ms)
    return {way: statistics.median(of) for way, of in times.items()}


def measure_tables(num_steps: int) -> dict[str, float]:
    """Prints what page tables cost, and returns it for the line of JSON."""
    found: dict[str, float] = {}
    print("sequences × context | sent         | bytes a step | encode, decode ms | 1 worker p50 ms | 2 workers p50 ms")
    for num_sequences, context in CONTEXTS:
        coded = coding(num_sequences, context, num_steps)
        alone, two = (there_and_back(num_sequences, context, degree, num_steps) for degree in (1, 2))
        for way, (num_bytes, coding_ms) in coded.items():
            name = f"{num_sequences} × {context}"
            print(
                f"{name:19} | {way:12} | {num_bytes:12,.0f} | {coding_ms:17.3f} | {alone[way]:15.3f} | {two[way]:16.3f}"
            )
            key = f"{num_sequences}x{context}_{way.replace(' ', '_')}"
            found |= {f"{key}_bytes": round(num_bytes), f"{key}_coding_ms": round(coding_ms, 3)}
            found |= {f"{key}_1_worker_ms": round(alone[way], 3), f"{key}_2_workers_ms": round(two[way], 3)}
    return found


def main() -> None:
    """Prints the tables and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--table-steps", type=int, default=320, help="of each row with long contexts (default 320)")
    arguments = parser.parse_args()
    tables = measure_tables(arguments.table_steps)
    found = {
        "channel": over_channel(arguments.degree, arguments.steps),
        "ray_actor_calls": over_actors(arguments.degree, arguments.steps),
    }
    print("way              | p50 ms | p99 ms")
    for way, times in found.items():
        print(f"{way:16} | {statistics.median(times):6.3f} | {statistics.quantiles(times, n=100)[98]:6.3f}")
    medians = {way: statistics.median(times) for way, times in found.items()}
    print(
        json.dumps(
            {
                "degree": arguments.degree,
                "channel_p50_ms": round(medians["channel"], 3),
                "ray_actor_calls_over_channel": round(medians["ray_actor_calls"] / medians["channel"], 2),
                **tables,
            }
        )
    )


if __name__ == "__main__":
    main()
