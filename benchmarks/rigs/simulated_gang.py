"""A gang in simulated time, with everything that matters to routing.

It has the scheduler's rules: decodes first, then prompt chunks within a token budget, first come first served;
sequences whose adapter is still loading are passed over; idle adapters are evicted for other adapters and for KV, the
least recently used first. A sequence takes all pages of its KV when it starts, so that none is ever preempted. One
loader copies adapters one after the other. A load begins when the batch has room for the sequence that needs the
adapter, which is later than in a real gang.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from motet.router.fleet.affinity import RoutingRequest
from motet.workers.loop import EngineTimes
from motet.workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad
from motet.workers.wire.messages import Frame, ResidencyChange

MAX_LOADS_UNDER_WAY = 8


@dataclass(frozen=True)
class Costs:
    """Times and sizes of one gang. The defaults are about those of Llama-3-8B in bfloat16 on one large GPU."""

    s_per_step: float = 8e-3  # reads the weights
    s_per_decode: float = 5e-5  # reads a sequence's KV and its adapter
    s_per_prompt_token: float = 4e-5
    s_per_page: float = 5e-4  # of an adapter: 4 GiB/s from a local disk, 2 MiB pages
    num_pages: int = 10_000
    block_size: int = 16
    max_tokens_per_step: int = 512
    max_num_sequences: int = 128


@dataclass(eq=False)
class Job:
    """One request, and what became of it."""

    arrives_at: float
    router: int
    digest: str
    num_adapter_pages: int
    num_prompt_tokens: int
    num_output_tokens: int
    gang: str = ""
    num_left: int = 0  # prompt tokens still to compute
    started_at: float = math.nan  # the step that computes its first token begins
    ended_at: float = math.nan
    was_hit: bool = False  # its adapter was there when it came to its gang
    began_load: bool = False

    def __post_init__(self) -> None:
        self.num_left = self.num_prompt_tokens

    @property
    def request(self) -> RoutingRequest:
        return RoutingRequest(self.digest, self.num_prompt_tokens, self.num_adapter_pages)


@dataclass
class _Adapter:
    num_pages: int
    ready_at: float
    num_users: int = 0


class SimulatedGang:
    """Advances one step at a time: `step` begins a step and returns when it ends, `end_step` ends it."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.inbox: deque[tuple[float, Job]] = deque()  # with the time at which each comes
        self._waiting: list[Job] = []
        self._prefilling: list[Job] = []
        self._ending: dict[int, list[Job]] = {}  # by the step after which they are finished
        self._num_decoding = 0
        self._num_free_pages = costs.num_pages
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()  # least recently used first
        self._coming: deque[str] = deque()
        self._loader_free_at = 0.0
        self._moved: dict[str, None] = {}
        self._num_steps = self._num_computed = self._num_generated = self._num_loads = self._num_loaded_pages = 0
        self._num_evictions = 0
        self._now = 0.0
        self._times = EngineTimes(clock=lambda: self._now)

    def next_step_at(self, now: float) -> float | None:
        """When the next step can begin: at once, or when a job arrives; None: there is nothing to do or to come."""
        if self._num_decoding or self._prefilling:
            return now
        times = [self.inbox[0][0]] if self.inbox else []
        if self._coming:
            times.append(self._adapters[self._coming[0]].ready_at)
        if not times:
            assert not self._waiting, "sequences wait for nothing"
            return None
        return max(now, min(times))

    def step(self, now: float) -> float:
        """Begins a step, and returns when it ends."""
        self._now = now
        self._times.begin_step()
        while self.inbox and self.inbox[0][0] <= now:
            job = self.inbox.popleft()[1]
            adapter = self._adapters.get(job.digest)
            job.was_hit = adapter is not None and adapter.ready_at <= now
            self._waiting.append(job)
        while self._coming and self._adapters[self._coming[0]].ready_at <= now:
            self._num_loaded_pages += self._adapters[self._coming.popleft()].num_pages
        self._num_steps += 1
        num_decodes = self._num_decoding
        budget = self._costs.max_tokens_per_step - num_decodes
        self._admit(now, budget - sum(job.num_left for job in self._prefilling))
        num_prompt_tokens = self._compute_prompts(now, budget)
        self._num_computed += num_decodes + num_prompt_tokens
        if not num_decodes and not num_prompt_tokens:
            return now
        step_s = self._costs.s_per_step + num_decodes * self._costs.s_per_decode
        step_s += num_prompt_tokens * self._costs.s_per_prompt_token
        return now + step_s

    def end_step(self, now: float) -> tuple[Frame, list[Job]]:
        """The content of the step's frame to routers, and the jobs that ended with the step."""
        self._now = now
        self._num_generated += self._num_decoding
        ended = self._ending.pop(self._num_steps, [])
        for job in ended:
            job.ended_at = now
            self._num_decoding -= 1
            self._num_free_pages += self._kv_pages(job)
            self._adapters[job.digest].num_users -= 1
            self._adapters.move_to_end(job.digest)
        moved, self._moved = self._moved, {}
        residency = ResidencyChange(
            [d for d in moved if d in self._adapters], [d for d in moved if d not in self._adapters]
        )
        return Frame([], self._times.end_step(self._load(now)), residency), ended

    def _load(self, now: float) -> EngineLoad:
        queued = sum(job.num_left for job in self._prefilling) + sum(job.num_left for job in self._waiting)
        gauges = EngineGauges(
            num_running=self._num_decoding + len(self._prefilling),
            num_waiting=len(self._waiting),
            num_waiting_for_adapters=sum(not self._is_ready(job.digest, now) for job in self._waiting),
            num_queued_tokens=queued + self._num_decoding,
            num_coming_adapters=len(self._coming),
        )
        counters = EngineCounters(
            num_computed_tokens=self._num_computed,
            num_generated_tokens=self._num_generated,
            num_steps=self._num_steps,
            num_adapter_loads=self._num_loads,
            num_adapter_evictions=self._num_evictions,
            num_loaded_pages=self._num_loaded_pages,
        )
        return EngineLoad(gauges, counters)

    def _admit(self, now: float, budget: int) -> None:
        wanted: set[str] = set()
        admitted: set[Job] = set()
        for job in self._waiting:
            num_running = self._num_decoding + len(self._prefilling)
            if budget <= 0 or num_running >= self._costs.max_num_sequences:
                break
            if not self._is_ready(job.digest, now):
                if job.digest not in self._adapters and not self._begin_load(job, now, wanted):
                    break
                wanted.add(job.digest)
                continue
            wanted.add(job.digest)
            if not self._make_room(self._kv_pages(job), now, wanted):
                break
            self._num_free_pages -= self._kv_pages(job)
            self._adapters[job.digest].num_users += 1
            self._adapters.move_to_end(job.digest)
            self._prefilling.append(job)
            admitted.add(job)
            budget -= job.num_left
        self._waiting = [job for job in self._waiting if job not in admitted]

    def _compute_prompts(self, now: float, budget: int) -> int:
        """Computes prompt chunks; returns their tokens. A sequence decodes in the step after the end of its prompt."""
        computed = 0
        for job in self._prefilling:
            num_tokens = min(job.num_left, budget - computed)
            job.num_left -= num_tokens
            computed += num_tokens
            if job.num_left:
                break
            job.started_at = now
            self._num_decoding += 1
            self._ending.setdefault(self._num_steps + job.num_output_tokens - 1, []).append(job)
        self._prefilling = [job for job in self._prefilling if job.num_left]
        return computed

    def _begin_load(self, job: Job, now: float, wanted: set[str]) -> bool:
        num_pages = job.num_adapter_pages
        if len(self._coming) >= MAX_LOADS_UNDER_WAY or not self._make_room(num_pages, now, wanted):
            return False
        begins_at = max(now, self._loader_free_at)
        self._loader_free_at = begins_at + num_pages * self._costs.s_per_page
        self._adapters[job.digest] = _Adapter(num_pages, self._loader_free_at)
        self._coming.append(job.digest)
        self._num_free_pages -= num_pages
        self._moved[job.digest] = None
        self._num_loads += 1
        job.began_load = True
        return True

    def _make_room(self, num_pages: int, now: float, keep: set[str]) -> bool:
        going = []
        short = num_pages - self._num_free_pages
        if short > 0:
            for digest, adapter in self._adapters.items():
                if not adapter.num_users and adapter.ready_at <= now and digest not in keep:
                    going.append(digest)
                    short -= adapter.num_pages
                    if short <= 0:
                        break
            if short > 0:
                return False
        self._num_evictions += len(going)
        for digest in going:
            self._num_free_pages += self._adapters.pop(digest).num_pages
            self._moved[digest] = None
        return True

    def _is_ready(self, digest: str, now: float) -> bool:
        adapter = self._adapters.get(digest)
        return adapter is not None and adapter.ready_at <= now

    def _kv_pages(self, job: Job) -> int:
        return -(-(job.num_prompt_tokens + job.num_output_tokens) // self._costs.block_size)
