"""Choosing a gang for each request: motet's policy against round robin, least loaded and consistent hashing, simulated.

The policy, and what a router knows of a gang, are the product's own code; gangs, network and time are simulated. The
popularity of adapters follows a power law; arrivals are a Poisson process near the capacity of the fleet. Queueing is
the time from a request's arrival at its router until the step that computes its first token begins, with the load of a
cold adapter; total is the time until its last token. The first third of the requests warms up and is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from motet.benchmarks.rigs.power_law import draw_jobs
from motet.benchmarks.rigs.simulated_fleet import Choose, simulate
from motet.benchmarks.rigs.simulated_gang import Costs, Job
from motet.router.fleet.affinity import GangView, RoutingConfig, RoutingRequest, choose_gang

HEADROOM = 1.1  # consistent hashing sends no gang more than this times the mean
CONFIG = RoutingConfig()


@dataclass(frozen=True)
class Row:
    """One policy's run, without its warm-up."""

    policy: str
    num_cold_loads: int
    hit_rate: float  # requests whose adapter was there when they came to their gang
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
    parser.add_argument("--exponent", type=float, default=1.0, help="of the power law (default 1, Zipf's)")
    parser.add_argument("--load", type=float, default=0.9, help="of what the gangs can bear (default 0.9)")
    parser.add_argument(
        "--s-per-page", type=float, default=Costs.s_per_page, help="of a cold load (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    costs = Costs(s_per_page=arguments.s_per_page)
    rate = arguments.load * arguments.gangs * _capacity(costs)
    print(f"{arguments.gangs} gangs, {arguments.routers} routers, {arguments.adapters} adapters, {rate:.0f} requests/s")
    print(
        f"{'policy':20}{'hit rate':>9}{'cold loads':>11}{'queueing p50':>13}{'p99 ms':>8}{'total p50':>10}{'p99 s':>7}"
    )
    rows = {}
    for policy, make_chooser in POLICIES.items():
        jobs = draw_jobs(
            arguments.requests, rate, arguments.adapters, arguments.exponent, arguments.routers, arguments.seed
        )
        simulate(jobs, arguments.gangs, [make_chooser(router) for router in range(arguments.routers)], costs)
        rows[policy] = _measured(policy, jobs[len(jobs) // 3 :])
        _print_row(rows[policy])
    _report(rows)


def _capacity(costs: Costs) -> float:
    """Requests per second that one gang serves with a full batch and all adapters in its pool."""
    num = costs.max_num_sequences
    jobs = draw_jobs(20 * num, rate=1e9, num_adapters=1, exponent=1.0, num_routers=1, seed=1)
    simulate(jobs, 1, [lambda request, gangs: gangs[0].key], costs)
    ended = sorted(job.ended_at for job in jobs)
    return (len(jobs) - 2 * num) / (ended[-num] - ended[num])


def _measured(policy: str, jobs: Sequence[Job]) -> Row:
    queueing = sorted(job.started_at - job.arrives_at for job in jobs)
    total = sorted(job.ended_at - job.arrives_at for job in jobs)
    middle, high = len(jobs) // 2, 99 * len(jobs) // 100
    return Row(
        policy,
        sum(job.began_load for job in jobs),
        sum(job.was_hit for job in jobs) / len(jobs),
        queueing[middle],
        queueing[high],
        total[middle],
        total[high],
    )


def _motet(router: int) -> Choose:
    def choose(request: RoutingRequest, gangs: Sequence[GangView]) -> str:
        key = choose_gang(request, gangs, CONFIG)
        assert key is not None
        return key

    return choose


def _round_robin(router: int) -> Choose:
    turns = itertools.count(7 * router)  # routers begin at different gangs
    return lambda request, gangs: gangs[next(turns) % len(gangs)].key


def _least_loaded(router: int) -> Choose:
    """The least loaded gang by the measure of motet's policy, for any adapter. Routers break ties differently."""
    ties = random.Random(router)
    return lambda request, gangs: min(gangs, key=lambda g: (g.crowd_s(CONFIG.num_shared_steps), ties.random())).key


def _less_loaded_of_two(router: int) -> Choose:
    """The less loaded of two random gangs, so that routers with outdated loads do not all choose the same one."""
    draws = random.Random(router)
    return lambda request, gangs: min(draws.sample(gangs, 2), key=lambda g: g.crowd_s(CONFIG.num_shared_steps)).key


def _consistent_hashing(router: int) -> Choose:
    """Consistent hashing with bounded loads (arXiv 1608.01350): the adapter's first gang with at most HEADROOM."""

    def choose(request: RoutingRequest, gangs: Sequence[GangView]) -> str:
        bound = HEADROOM * (1 + sum(gang.num_sequences for gang in gangs)) / len(gangs)
        order = sorted(gangs, key=lambda gang: blake2b(f"{request.digest} {gang.key}".encode()).digest())
        return next(gang for gang in order if gang.num_sequences < bound).key

    return choose


POLICIES: dict[str, Callable[[int], Choose]] = {
    "motet": _motet,
    "round robin": _round_robin,
    "least loaded": _least_loaded,
    "less loaded of two": _less_loaded_of_two,
    "consistent hashing": _consistent_hashing,
}


def _print_row(row: Row) -> None:
    print(
        f"{row.policy:20}{row.hit_rate:9.1%}{row.num_cold_loads:11d}{1e3 * row.queueing_p50_s:13.0f}"
        f"{1e3 * row.queueing_p99_s:8.0f}{row.total_p50_s:10.2f}{row.total_p99_s:7.2f}",
        flush=True,
    )


def _report(rows: dict[str, Row]) -> None:
    ours = rows["motet"]
    summary: dict[str, object] = {"benchmark": "routing", "hit_rate": round(ours.hit_rate, 3)}
    for policy in ("least loaded", "less loaded of two"):
        baseline = rows[policy]
        summary[f"against {policy}"] = {
            "hit_rate": round(baseline.hit_rate, 3),
            "times_fewer_cold_loads": round(baseline.num_cold_loads / ours.num_cold_loads, 2),
            "queueing_p99_ratio": round(ours.queueing_p99_s / baseline.queueing_p99_s, 2),
            "total_p99_ratio": round(ours.total_p99_s / baseline.total_p99_s, 2),
        }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
