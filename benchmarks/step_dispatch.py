"""Time to send a plan to all workers of a gang and to receive their results, while no worker computes anything.

Workers are processes. They decode a plan of 64 decoding sequences with adapters, and answer at once with 64 tokens (the
first worker) or an empty result, over the channel that real workers use. The baseline sends the same plan with Ray
actor calls, one to each worker in each step.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray

from motet.workers.execution.connection import Connection, ConnectionLostError
from motet.workers.execution.gang_executor import GangExecutor
from motet.workers.execution.gang_messages import Done, ToWorker
from motet.workers.plan import Residence, SampledToken, SamplePlan, SequencePlan, StepPlan, StepResult, packed
from motet.workers.wire.messages import SamplingParams

NUM_SEQUENCES = 64


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
    decoder = msgspec.msgpack.Decoder(ToWorker)
    try:
        while (plan := getattr(decoder.decode(connection.receive()), "plan", None)) is not None:
            connection.send(msgspec.msgpack.encode(Done(plan.step, result_of(plan, rank))))
    except ConnectionLostError:
        pass  # the benchmark is over


class RayWorker:
    """The baseline's worker."""

    def execute(self, plan: StepPlan, rank: int) -> dict[int, SampledToken | None]:
        return result_of(plan, rank)


def measure(execute: Callable[[StepPlan], object], num_steps: int) -> list[float]:
    """Milliseconds of each step, without the first tenth of the steps."""
    times = []
    for step in range(num_steps):
        plan = make_plan(step)
        started = time.perf_counter()
        execute(plan)
        times.append((time.perf_counter() - started) * 1e3)
    return times[num_steps // 10 :]


def over_channel(degree: int, num_steps: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        processes = [context.Process(target=stand_in, args=(port, rank), daemon=True) for rank in range(degree)]
        for process in processes:
            process.start()
        accepted = [Connection(listener.accept()[0]) for _ in processes]
    by_rank = {msgspec.msgpack.decode(connection.receive()): connection for connection in accepted}
    executor = GangExecutor([by_rank[rank] for rank in range(degree)], None, step_deadline_s=30.0)

    def execute(plan: StepPlan) -> StepResult:
        executor.begin(plan)
        return executor.finish()

    times = measure(execute, num_steps)
    executor.close()
    for process in processes:
        process.join()
    return times


def over_actors(degree: int, num_steps: int) -> list[float]:
    ray.init(address="local", num_cpus=degree, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor: Any = ray.remote(RayWorker)
    workers = [actor.options(num_cpus=1).remote() for _ in range(degree)]

    def execute(plan: StepPlan) -> object:
        return ray.get([worker.execute.remote(plan, rank) for rank, worker in enumerate(workers)])

    times = measure(execute, num_steps)
    ray.shutdown()
    return times


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
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
            }
        )
    )


if __name__ == "__main__":
    main()
