"""Routers and gangs in simulated time. A router knows of a gang what a real router knows, by the same code.

That is the content of frames, which arrive late, and what the router itself has sent to the gang.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from motet.benchmarks.rigs.simulated_gang import Costs, Job, SimulatedGang
from motet.router.fleet.affinity import GangView, RoutingConfig, RoutingRequest
from motet.router.fleet.known_gang import KnownGang
from motet.workers.wire.messages import Frame

MESSAGE_S = 1e-3  # from a router to a gang, and back

Choose = Callable[[RoutingRequest, Sequence[GangView]], str]


@dataclass
class _Router:
    choose: Choose
    known: dict[str, KnownGang]
    unread: deque[tuple[float, str, Frame | Job]] = field(default_factory=deque)  # by the time of arrival

    def read(self, now: float) -> None:
        """Takes in the messages that have arrived: a frame of a gang, or the end of a sequence there."""
        while self.unread and self.unread[0][0] <= now:
            _, key, news = self.unread.popleft()
            if isinstance(news, Frame):
                self.known[key].receive(news)
            else:
                self.known[key].ended(news.digest)


def simulate(jobs: Sequence[Job], num_gangs: int, choosers: Sequence[Choose], costs: Costs) -> None:
    """Serves all jobs, which are in order of arrival, and fills in what became of them. One router for each chooser."""
    gangs = {f"gang-{number}": SimulatedGang(costs) for number in range(num_gangs)}
    config = RoutingConfig()
    routers = [_Router(choose, {key: KnownGang(config) for key in gangs}) for choose in choosers]
    events: list[tuple[float, str, bool]] = []  # a gang's step begins, or (True) ends
    begins_at = dict.fromkeys(gangs, math.inf)  # of gangs between steps; -inf within one. Other begins are outdated
    arrivals = deque(jobs)
    while arrivals or events:
        if arrivals and (not events or arrivals[0].arrives_at <= events[0][0]):
            job = arrivals.popleft()
            router = routers[job.router]
            router.read(job.arrives_at)
            key = router.choose(job.request, [known.view(key, job.digest) for key, known in router.known.items()])
            router.known[key].add_sequence(job.request)
            job.gang = key
            arrives_at = job.arrives_at + MESSAGE_S
            gangs[key].inbox.append((arrives_at, job))
            if arrives_at < begins_at[key]:
                begins_at[key] = arrives_at
                heapq.heappush(events, (arrives_at, key, False))
            continue
        now, key, is_end = heapq.heappop(events)
        gang = gangs[key]
        if not is_end:
            if now == begins_at[key]:
                begins_at[key] = -math.inf
                heapq.heappush(events, (gang.step(now), key, True))
            continue
        frame, ended = gang.end_step(now)
        for router in routers:
            router.unread.append((now + MESSAGE_S, key, frame))
        for job in ended:
            routers[job.router].unread.append((now + MESSAGE_S, key, job))
        next_at = gang.next_step_at(now)
        begins_at[key] = math.inf if next_at is None else next_at
        if next_at is not None:
            heapq.heappush(events, (next_at, key, False))
