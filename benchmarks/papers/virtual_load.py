"""A load on the real scheduler in virtual time, with a policy before it that decides which requests may join."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from motet.workers.plan import SampledToken, StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits
from motet.workers.wire.engine_load import EngineGauges
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 18
STEP_S, TOKEN_S = 0.02, 1e-4  # of a step, and more of each of its tokens
_WORD = SampledToken(1, None)


@dataclass(frozen=True, eq=False)
class Job:
    prompt: int  # tokens
    answer: int
    arrives_s: float = 0.0
    adapter: str | None = None
    num_samples: int = 1  # answers to the same prompt


class Policy(Protocol):
    """Stands before the scheduler: it alone knows requests that have not joined."""

    def admit(self, waiting: MutableSequence[Job], num_running: int, now_s: float, is_last: bool) -> int:
        """How many of the first waiting requests join now; it may reorder them. `is_last`: no others will come."""

    def end(self, job: Job) -> None:
        """Its answer has ended."""

    def num_rows(self, num_tokens: int) -> int:
        """Rows that a step computes for so many tokens, padding included."""

    def pause_s(self) -> float:
        """How long no step runs, for what the policy has just done."""


@dataclass
class Outcome:
    """Means are over the steps while requests wait."""

    seconds: float = 0.0
    num_steps: int = 0
    num_answer_tokens: int = 0
    num_computed: int = 0
    num_preemptions: int = 0
    waits_s: list[float] = field(default_factory=list)  # from arrival to the first token, of each request
    token_s: dict[Job, float] = field(default_factory=dict)  # from arrival to the last token, for each of its answer
    running: list[int] = field(default_factory=list)  # sequences
    kept_tokens: list[int] = field(default_factory=list)
    held_tokens: list[int] = field(default_factory=list)  # that their pages have room for; shared pages count once
    apart_tokens: list[int] = field(default_factory=list)  # the same if none were shared
    adapter_pages: list[int] = field(default_factory=list)  # of adapters that running sequences use
    kept_pages: list[int] = field(default_factory=list)  # of other adapters and of KV that nothing uses now

    @property
    def tokens_per_s(self) -> float:
        return self.num_answer_tokens / self.seconds

    @property
    def num_running(self) -> float:
        return fmean(self.running) if self.running else 0.0

    def filled(self, num_tokens: int) -> float:
        """The share of a pool of so many tokens that holds tokens."""
        return fmean(self.kept_tokens) / num_tokens if self.kept_tokens else 0.0

    @property
    def saved(self) -> float:
        """The share of the pages that sharing saves, in all steps."""
        return 1 - sum(self.held_tokens) / sum(self.apart_tokens)


def run(
    jobs: Sequence[Job],
    policy: Policy,
    num_pages: int = 1 << 16,
    max_num_sequences: int = 4096,
    max_tokens_per_step: int = 2048,
    block_size: int = BLOCK_SIZE,
    pages_of_adapter: Callable[[AdapterRef], int] = lambda _: 1,
    load_page_s: float = 0.0,
    step_s: Callable[[StepPlan], float] | None = None,
) -> Outcome:
    """All jobs, in the order of their arrival, to their ends. Adapters are copied one by one, beside the steps.

    `step_s`: what a plan takes; None: a constant, and more for each row.
    """
    limits = GangLimits(8192, VOCAB_SIZE, block_size, num_pages, max_tokens_per_step, max_num_sequences)
    scheduler = Scheduler(limits, frozenset(), pages_of_adapter, scheduling="fifo")
    coming, waiting, found = deque(sorted(jobs, key=lambda job: job.arrives_s)), deque[Job](), Outcome()
    begun, owners, left = set[Job](), dict[int, Job](), dict[Job, int]()
    loads = deque[tuple[float, str]]()  # under way: when each ends
    while coming or waiting or scheduler.has_work():
        while coming and coming[0].arrives_s <= found.seconds:
            waiting.append(coming.popleft())
        for _ in range(policy.admit(waiting, len(left), found.seconds, not coming)):
            job = waiting.popleft()
            left[job] = job.num_samples
            for request in _requests(job, len(owners)):
                owners[request.sequence_id] = job
                assert (error := scheduler.add(request, request.sequence_id)) is None, error
        found.seconds += policy.pause_s()
        plan = scheduler.schedule()
        for load in plan.loads:
            begins_s = max(found.seconds, loads[-1][0] if loads else 0.0)
            loads.append((begins_s + load_page_s * len(load.residence.pages), load.residence.digest))
        num_tokens = sum([len(part.token_ids) for part in plan.sequences])
        if num_tokens:
            found.seconds += STEP_S + TOKEN_S * policy.num_rows(num_tokens) if step_s is None else step_s(plan)
            found.num_steps += 1
        elif loads:
            found.seconds = max(found.seconds, loads[0][0])
        elif not scheduler.has_work():
            found.seconds = max(found.seconds + STEP_S, coming[0].arrives_s if coming and not waiting else 0.0)
        gauges = scheduler.load().gauges
        if waiting or gauges.num_waiting:
            _note(scheduler, gauges, found, block_size)
        tokens: dict[int, SampledToken | None] = {
            part.sequence_id: _WORD for part in plan.sequences if part.sample is not None
        }
        loaded = list[str]()
        while loads and loads[0][0] <= found.seconds:
            loaded.append(loads.popleft()[1])
        for update in scheduler.commit(plan, StepResult(plan.step, tokens, tuple(loaded), ())):
            job = owners[update.sequence_id]
            found.num_answer_tokens += len(update.token_ids)
            if job not in begun and update.token_ids:
                begun.add(job)
                found.waits_s.append(found.seconds - job.arrives_s)
            if update.finish_reason is not None:
                left[job] -= 1
                if not left[job]:
                    found.token_s[job] = (found.seconds - job.arrives_s) / job.answer
                    del left[job]
                    policy.end(job)
    counters = scheduler.load().counters
    found.num_computed, found.num_preemptions = counters.num_computed_tokens, counters.num_preemptions
    return found


def _requests(job: Job, first: int) -> list[SequenceRequest]:
    prompt = [2 + first, *range(2, job.prompt + 1)]
    return [
        SequenceRequest(
            sequence_id=first + number,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=job.answer, ignore_eos=True),
            tenant="t",
            adapter=None if job.adapter is None else AdapterRef(job.adapter, {"q_proj": 8}),
        )
        for number in range(job.num_samples)
    ]


def _note(scheduler: Scheduler, gauges: EngineGauges, found: Outcome, block_size: int) -> None:
    sequences = scheduler._running.by_id.values()
    num_idle = gauges.num_free_pages + gauges.num_idle_prefix_pages
    found.running.append(len(sequences))
    found.kept_tokens.append(sum([sequence.num_computed + sequence.num_planned for sequence in sequences]))
    found.held_tokens.append((gauges.num_pages - num_idle - gauges.num_adapter_pages) * block_size)
    found.apart_tokens.append(sum([len(sequence.pages) for sequence in sequences]) * block_size)
    found.adapter_pages.append(gauges.num_adapter_pages - gauges.num_idle_adapter_pages)
    found.kept_pages.append(gauges.num_idle_adapter_pages + gauges.num_idle_prefix_pages)
