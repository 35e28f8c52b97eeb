"""Which gang serves a request: motet's policy against round robin, least loaded and consistent hashing, simulated.

The policy and what a router knows of a gang are the product's own code; gangs, network and time are simulated
(`simulated_fleet.py`). Popularity of adapters follows a power law, arrivals are Poisson, near what the fleet can bear.
Queueing is the time from a request's arrival at its router until the step that computes its first token begins, cold
load included. The first third of the requests warms up and is not counted.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from simulated_fleet import Choose, Costs, Job, simulate

from motet.router.affinity import GangView, RoutingConfig, RoutingRequest, choose_gang

ADAPTER_PAGES = {20: 0.4, 40: 0.3, 80: 0.2, 160: 0.1}  # ranks 8, 16, 32 and 64 of Llama-3-8B, and their shares
MEAN_PROMPT_TOKENS, MEAN_OUTPUT_TOKENS = 400, 150
HEADROOM = 1.25  # consistent hashing sends no gang more than this times the mean


@dataclass(frozen=True)
class Row:
    """One policy's run."""

    policy: str
    num_cold_loads: int
    hit_rate: float
    queueing_p50_s: float
    queueing_p99_s: float
    total_p50_s: float
    total_p99_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gangs", type=int, default=16)
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--adapters", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--exponent", type=float, default=1.0, help="of the power law (default 1: Zipf's)")
    parser.add_argument("--load", type=float, default=0.9, help="of what the gangs can bear (default 0.9)")
    parser.add_argument("--s-per-page", type=float, default=Costs.s_per_page, help="of a cold load")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    costs = Costs(s_per_page=arguments.s_per_page)
    rate = arguments.load * arguments.gangs * capacity(costs)
    print(f"{arguments.gangs} gangs, {arguments.routers} routers, {arguments.adapters} adapters, {rate:.0f} requests/s")
    print(f"{'policy':20} {'cold loads':>10} {'hit rate':>8} {'queueing p50':>12} {'p99':>8} {'total p50':>9} {'p99':>8}")
    rows = {}
    for policy in POLICIES:
        began = time.perf_counter()
        jobs = draw_jobs(
            arguments.requests, rate, arguments.adapters, arguments.exponent, arguments.routers, arguments.seed
        )
        choosers = [POLICIES[policy](number) for number in range(arguments.routers)]
        simulate(jobs, arguments.gangs, choosers, costs)
        rows[policy] = row = measured(policy, jobs[len(jobs) // 3 :])
        print(
            f"{policy:20} {row.num_cold_loads:10d} {row.hit_rate:8.1%} {1e3 * row.queueing_p50_s:9.0f} ms"
            f" {1e3 * row.queueing_p99_s:5.0f} ms {row.total_p50_s:7.2f} s {row.total_p99_s:6.2f} s"
            f"   {time.perf_counter() - began:.0f}",
            flush=True,
        )


def capacity(costs: Costs) -> float:
    """Requests a second that one gang serves with all its sequences taken and all adapters there."""
    num = costs.max_num_sequences
    jobs = draw_jobs(20 * num, 1e9, 1, 1.0, 1, seed=1)
    simulate(jobs, 1, [lambda request, gangs: gangs[0].key], costs)
    ended = sorted(job.ended_at or 0.0 for job in jobs)
    return (len(jobs) - 2 * num) / (ended[-num] - ended[num])


def draw_jobs(
    count: int, rate: float, num_adapters: int, exponent: float, num_routers: int, seed: int
) -> list[Job]:
    """Requests in order of arrival. The same seed gives the same ones."""
    generator = random.Random(seed)
    shares = list(itertools.accumulate(rank**-exponent for rank in range(1, num_adapters + 1)))
    pages = generator.choices(list(ADAPTER_PAGES), list(ADAPTER_PAGES.values()), k=num_adapters)
    jobs, now = [], 0.0
    for _ in range(count):
        now += generator.expovariate(rate)
        adapter = bisect.bisect(shares, generator.random() * shares[-1])
        jobs.append(
            Job(
                now,
                generator.randrange(num_routers),
                f"adapter-{adapter}",
                pages[adapter],
                _length(generator, MEAN_PROMPT_TOKENS),
                _length(generator, MEAN_OUTPUT_TOKENS),
            )
        )
    return jobs


def _length(generator: random.Random, mean: float) -> int:
    """Log-normal, as lengths of conversations are."""
    sigma = 0.8
    drawn = generator.lognormvariate(0, sigma) * mean / 2.718281828 ** (sigma * sigma / 2)
    return min(max(round(drawn), 1), 8 * round(mean))


def measured(policy: str, jobs: Sequence[Job]) -> Row:
    queueing = sorted((job.started_at or 0.0) - job.arrives_at for job in jobs)
    total = sorted((job.ended_at or 0.0) - job.arrives_at for job in jobs)
    return Row(
        policy,
        sum(job.began_load for job in jobs),
        sum(bool(job.was_hit) for job in jobs) / len(jobs),
        queueing[len(jobs) // 2],
        queueing[99 * len(jobs) // 100],
        total[len(jobs) // 2],
        total[99 * len(jobs) // 100],
    )


def ours(router: int) -> Choose:
    config = RoutingConfig()

    def choose(request: RoutingRequest, gangs: Sequence[GangView]) -> str:
        key = choose_gang(request, gangs, config)
        assert key is not None
        return key

    return choose


def round_robin(router: int) -> Choose:
    turns = itertools.count(7 * router)  # routers start at different gangs
    return lambda request, gangs: gangs[next(turns) % len(gangs)].key


def least_loaded(router: int) -> Choose:
    """Fewest sequences; among equals each router has an order of its own, so that they do not all run to one gang."""
    generator = random.Random(router)
    return lambda request, gangs: min(gangs, key=lambda gang: (gang.num_sequences, generator.random())).key


def least_queued(router: int) -> Choose:
    generator = random.Random(router)
    return lambda request, gangs: min(gangs, key=lambda gang: (gang.num_queued_tokens, generator.random())).key


def consistent_hashing(router: int) -> Choose:
    """With bounded loads (arXiv 1608.01350): the adapter's first gang that has no more than its share and a quarter."""

    def choose(request: RoutingRequest, gangs: Sequence[GangView]) -> str:
        bound = HEADROOM * (1 + sum(gang.num_sequences for gang in gangs)) / len(gangs)
        order = sorted(gangs, key=lambda gang: blake2b(f"{request.digest} {gang.key}".encode()).digest())
        return next(gang for gang in order if gang.num_sequences < bound).key

    return choose


POLICIES = {
    "motet": ours,
    "round robin": round_robin,
    "least loaded": least_loaded,
    "least queued": least_queued,
    "consistent hashing": consistent_hashing,
}


if __name__ == "__main__":
    main()
