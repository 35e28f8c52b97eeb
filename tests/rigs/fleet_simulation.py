"""A simple simulation of gangs that a policy starts and stops, in time steps of one second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from motet.cluster.scaling import FleetState, GangLoad
from motet.tests.rigs.recorded_day import Arrival

STEP_S = 1.0
WINDOW = 5  # steps that a gang's load is the mean of
START_S = 40.0
TOKENS_PER_S = 4000.0  # what a gang computes, prompts and new tokens alike
NEW_TOKENS_PER_S = 20.0  # of one sequence at most
MAX_RUNNING = 64  # sequences of a gang

Policy = Callable[[FleetState], int]


@dataclass(eq=False)
class Sequence:
    arrived_s: float
    prompt_left: float
    new_left: float


@dataclass(eq=False)
class Gang:
    serves_from_s: float
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    loads: deque[GangLoad] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def num_sequences(self) -> int:
        return len(self.waiting) + len(self.running)

    def step(self) -> Iterator[Sequence]:
        """Computes one time step: new tokens first, then prompts in order. Yields sequences that got a first token."""
        while self.waiting and len(self.running) < MAX_RUNNING:
            self.running.append(self.waiting.popleft())
        budget = TOKENS_PER_S * STEP_S
        for sequence in self.running:
            if sequence.prompt_left <= 0:
                taken = min(NEW_TOKENS_PER_S * STEP_S, sequence.new_left, budget)
                sequence.new_left -= taken
                budget -= taken
        for sequence in self.running:
            if sequence.prompt_left > 0 and budget > 0:
                taken = min(sequence.prompt_left, budget)
                sequence.prompt_left -= taken
                budget -= taken
                if sequence.prompt_left <= 0:
                    yield sequence
        self.running = [sequence for sequence in self.running if sequence.new_left > 0]
        self.loads.append(
            GangLoad(
                num_sequences=self.num_sequences,
                queued_tokens=sum(max(0.0, s.prompt_left) for s in (*self.waiting, *self.running)),
                pool_pressure=len(self.running) / MAX_RUNNING,
                computed_tokens_per_s=TOKENS_PER_S - budget / STEP_S,
            )
        )

    def reported(self) -> GangLoad:
        """The mean over the window."""
        names = ("num_sequences", "queued_tokens", "pool_pressure", "computed_tokens_per_s")
        return GangLoad(**{name: sum(getattr(load, name) for load in self.loads) / len(self.loads) for name in names})


@dataclass
class Outcome:
    targets: list[int] = field(default_factory=list)  # at each step
    first_token_s: list[float] = field(default_factory=list)  # after each arrival, as far as served
    gang_s: float = 0.0  # spent by all gangs, starting ones too

    @property
    def num_changes(self) -> int:
        return sum(one != other for one, other in pairwise(self.targets))

    def wait_s(self, share: float) -> float:
        """The delay of the first token that this share of requests does not exceed."""
        return sorted(self.first_token_s)[int(share * (len(self.first_token_s) - 1))]


def simulate(arrivals: Iterable[Arrival], policy: Policy, duration_s: float, num_gangs: int = 0) -> Outcome:
    """Runs until the time is over and everything is served. This many gangs serve from the start."""
    outcome = Outcome()
    coming = deque(arrivals)
    parked: deque[Sequence] = deque()  # they wait at a router, for any gang
    gangs = [Gang(0.0) for _ in range(num_gangs)]
    step = 0
    while step * STEP_S < duration_s or coming or parked or any(gang.num_sequences for gang in gangs):
        assert step * STEP_S < 2 * duration_s, "some are never served"
        now_s = step * STEP_S
        while coming and coming[0].at_s <= now_s:
            arrival = coming.popleft()
            parked.append(Sequence(arrival.at_s, arrival.num_prompt_tokens, arrival.num_new_tokens))
        serving = [gang for gang in gangs if gang.serves_from_s <= now_s]
        while parked and serving:
            min(serving, key=lambda gang: gang.num_sequences).waiting.append(parked.popleft())
        for gang in serving:
            outcome.first_token_s.extend(now_s + STEP_S - sequence.arrived_s for sequence in gang.step())
        reported = tuple(gang.reported() for gang in serving if len(gang.loads) > 1)
        state = FleetState(
            now_s=now_s, target=len(gangs), num_running=len(serving), gangs=reported, is_awaited=bool(parked)
        )
        target = policy(state)
        gangs += [Gang(now_s + START_S) for _ in range(target - len(gangs))]
        while len(gangs) > target:  # one that does not serve yet, or the last one; what it had goes on elsewhere
            leaving = max(gangs, key=lambda gang: gang.serves_from_s)
            gangs.remove(leaving)
            parked.extendleft(reversed((*leaving.running, *leaving.waiting)))
        outcome.targets.append(target)
        outcome.gang_s += len(gangs) * STEP_S
        step += 1
    return outcome
