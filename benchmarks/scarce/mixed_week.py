"""A gang below, at and above its capacity: 64 tenants, 2,000 adapters and shared documents, in virtual time.

Requests arrive by chance, whatever the gang does. As a router does for tenants with a latency objective, one is refused
on arrival if its first token is expected too late because of the queue. Goodput is the tokens a second of answers that
kept to both objectives: the first token in time, and the others one after the other in time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from bisect import bisect
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from motet.benchmarks.rigs.virtual_gang import BLOCK_SIZE, INFO, MAX_LEN, VOCAB_SIZE, VirtualCosts
from motet.workers.costs.replay import VirtualExecutor
from motet.workers.engine import Engine
from motet.workers.plan import SampledToken, StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest, Submit

LOADS = (0.5, 0.9, 1.2, 2.0)  # arrivals over what the gang can serve
NUM_TENANTS, NUM_ADAPTERS = 64, 2000
FIRST_TOKEN_S, TOKEN_S = 5.0, 0.1
# Mean and standard deviation of prompts and of answers, in tokens: ShareGPT, LMSYS, and short chats like Alpaca's.
LENGTHS = (((246, 547), (322, 244)), ((102, 169), (222, 210)), ((20, 20), (60, 60)))
_NUM_DOCUMENTS, _DOCUMENT_TOKENS, _DOCUMENT_SHARE = 40, 512, 0.2  # of requests that begin with one
_MAX_OUTPUT = 2048  # tokens
_ADAPTER_PAGES = 20
_LIMITS = GangLimits(MAX_LEN, VOCAB_SIZE, BLOCK_SIZE, 6000, 512, 128)
_EOS = 0
_DOUBT = 1.25  # a queue may take this many times what is expected
_WINDOW_S = 20.0  # in which it is observed how fast the queue gets shorter


@dataclass
class Request:
    """`num_output`: tokens until its answer ends by itself, which the gang does not know."""

    arrives_s: float
    tenant: str
    adapter: str
    prompt: list[int]
    num_output: int
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0

    @property
    def is_good(self) -> bool:
        if self.num_tokens < self.num_output or self.first_s is None or self.first_s - self.arrives_s > FIRST_TOKEN_S:
            return False
        return self.last_s - self.first_s <= TOKEN_S * max(self.num_tokens - 1, 1)


@dataclass(frozen=True)
class WeekFigures:
    """`p99_first_s`: time to first token of admitted requests, of the median tenant and of the worst."""

    load: float
    goodput: float  # tokens a second
    num_answers: int
    num_refused: int
    computed_over_needed: float
    loads_per_answer: float  # of adapters
    p99_first_s: float
    worst_p99_first_s: float


class _EndingExecutor(VirtualExecutor):
    """Each answer ends by itself, after its own number of tokens."""

    def __init__(self) -> None:
        super().__init__(VirtualCosts())
        self.num_output: dict[int, int] = {}  # by sequence
        self.num_recomputed = 0  # tokens
        self._most_computed: dict[int, int] = {}  # tokens, by sequence
        self._ends: list[int] = []

    def begin(self, plan: StepPlan) -> None:
        for part in plan.sequences:
            before, end = self._most_computed.get(part.sequence_id, 0), part.start + len(part.token_ids)
            self.num_recomputed += max(0, min(end, before) - part.start)
            self._most_computed[part.sequence_id] = max(before, end)
        self._ends = [
            part.sequence_id
            for part in plan.sequences
            if part.sample is not None and part.sample.index + 1 >= self.num_output[part.sequence_id]
        ]
        super().begin(plan)

    def finish(self) -> StepResult:
        ends = dict.fromkeys(self._ends, SampledToken(_EOS, None))
        result = super().finish()
        return msgspec.structs.replace(result, tokens={**result.tokens, **ends})


class MixedGang:
    """A gang that requests arrive at by chance."""

    def __init__(self) -> None:
        self._executor = _EndingExecutor()
        self._scheduler = Scheduler(_LIMITS, frozenset({_EOS}), lambda _: _ADAPTER_PAGES, clock=self._executor.clock)
        self._engine = Engine(self._scheduler, self._executor, INFO, clock=self._executor.clock)
        self._begun: deque[tuple[float, int]] = deque()  # when prompts left the queue, and their tokens
        self._num_waiting_tokens = 0  # of prompts whose first token has not come
        self.admitted: list[Request] = []
        self.num_refused = 0

    def run(self, requests: list[Request], seconds: float, *, refuses: bool) -> None:
        executor, coming = self._executor, deque(requests)
        while executor.now_s < seconds:
            while coming and coming[0].arrives_s <= executor.now_s:
                self._arrive(coming.popleft(), refuses=refuses)
            for update in self._engine.step():
                request = self.admitted[update.sequence_id]
                assert update.error is None, update.error
                if update.token_ids:
                    if request.first_s is None:
                        request.first_s = executor.now_s
                        self._begun.append((executor.now_s, len(request.prompt)))
                        self._num_waiting_tokens -= len(request.prompt)
                    request.last_s = executor.now_s
                    request.num_tokens += len(update.token_ids)
            self._engine.take_residency_changes()
            if self._engine.waits:
                executor.wait(min(coming[0].arrives_s, seconds) if coming else seconds)

    def figures(self, load: float, seconds: float) -> WeekFigures:
        answers = [request for request in self.admitted if request.num_tokens >= request.num_output]
        num_computed = self._executor.num_computed
        by_tenant: dict[str, list[float]] = {}
        for request in self.admitted:
            first_s = seconds if request.first_s is None else request.first_s
            by_tenant.setdefault(request.tenant, []).append(first_s - request.arrives_s)
        p99 = [float(np.percentile(waits, 99)) for waits in by_tenant.values()]
        return WeekFigures(
            load,
            sum(request.num_tokens for request in answers if request.is_good) / seconds,
            len(answers),
            self.num_refused,
            num_computed / (num_computed - self._executor.num_recomputed),
            self._scheduler.load().counters.num_adapter_loads / len(answers),
            float(np.median(p99)),
            max(p99),
        )

    def _arrive(self, request: Request, *, refuses: bool) -> None:
        if refuses and _DOUBT * self._queue_s() > FIRST_TOKEN_S:
            self.num_refused += 1
            return
        number = len(self.admitted)
        self.admitted.append(request)
        self._executor.num_output[number] = request.num_output
        self._num_waiting_tokens += len(request.prompt)
        sampling = SamplingParams(temperature=0.0, max_tokens=_MAX_OUTPUT)
        adapter = AdapterRef(request.adapter, {"q_proj": 8})
        self._engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=number,
                    prompt_token_ids=request.prompt,
                    sampling=sampling,
                    tenant=request.tenant,
                    adapter=adapter,
                )
            )
        )

    def _queue_s(self) -> float:
        """How long the queue is expected to take, by how fast prompts left it lately."""
        now_s = self._executor.now_s
        while self._begun and self._begun[0][0] < now_s - _WINDOW_S:
            self._begun.popleft()
        num_tokens = sum(number for _, number in self._begun)
        return self._num_waiting_tokens * min(_WINDOW_S, now_s) / num_tokens if num_tokens else 0.0


def draw(rate: float, seconds: float, seed: int = 0) -> list[Request]:
    """Requests in order of arrival, `rate` a second. Adapter i is asked for in proportion to 1 / (i + 1)."""
    chance = random.Random(seed)
    popularity = list(itertools.accumulate(1 / number for number in range(1, NUM_ADAPTERS + 1)))
    requests, now_s = list[Request](), 0.0
    for number in itertools.count():
        now_s += chance.expovariate(rate)
        if now_s >= seconds:
            return requests
        adapter = bisect(popularity, chance.random() * popularity[-1])
        prompt_of, output_of = chance.choice(LENGTHS)
        prompt = [number % VOCAB_SIZE, *range(1, _lognormal(chance, *prompt_of))]
        if chance.random() < _DOCUMENT_SHARE:
            prompt = [VOCAB_SIZE - 1 - chance.randrange(_NUM_DOCUMENTS), *range(1, _DOCUMENT_TOKENS), *prompt]
        num_output = min(_lognormal(chance, *output_of), _MAX_OUTPUT)
        requests.append(Request(now_s, f"tenant-{adapter % NUM_TENANTS}", f"adapter-{adapter}", prompt, num_output))
    raise AssertionError("unreachable")


def capacity(seconds: float) -> float:
    """Answers a second of a gang that always has a queue, once as many end as start."""
    gang = MixedGang()
    gang.run(draw(40.0, seconds), seconds, refuses=True)
    ends_s = [request.last_s for request in gang.admitted if request.num_tokens >= request.num_output]
    return sum(end_s > seconds / 2 for end_s in ends_s) / (seconds / 2)


def mixed_week(seconds: float = 120.0) -> list[WeekFigures]:
    rate = capacity(seconds)
    found = []
    for load in LOADS:
        gang = MixedGang()
        gang.run(draw(load * rate, seconds), seconds, refuses=True)
        found.append(gang.figures(load, seconds))
    return found


def _lognormal(chance: random.Random, mean: float, deviation: float) -> int:
    variance = np.log(1 + (deviation / mean) ** 2)
    return max(2, round(chance.lognormvariate(np.log(mean) - variance / 2, variance**0.5)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="Of virtual time, at each load.")
    figures = mixed_week(parser.parse_args().seconds)
    print("load  goodput/s  answers  refused  computed/needed  loads/answer  p99 first token: median, worst tenant")
    for one in figures:
        print(
            f"{one.load:4}  {one.goodput:9.0f}  {one.num_answers:7}  {one.num_refused:7}  "
            f"{one.computed_over_needed:15.2f}  {one.loads_per_answer:12.2f}  {one.p99_first_s:8.2f} s  "
            f"{one.worst_p99_first_s:8.2f} s"
        )
    goodput = {one.load: one.goodput for one in figures}
    print(json.dumps({"goodput_2_over_09": round(goodput[2.0] / goodput[0.9], 3)}))


if __name__ == "__main__":
    main()
