"""A gang that always has work, in virtual time: the real engine, and an executor that computes nothing."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from motet.workers.costs.replay import VirtualExecutor
from motet.workers.engine import Engine
from motet.workers.fairness.tenant_counters import OUTPUT_TOKEN, Scheduling
from motet.workers.plan import StepPlan
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import AdapterRef, GangInfo, SamplingParams, SequenceRequest, Submit

BLOCK_SIZE = 16
MAX_LEN = 1 << 17
VOCAB_SIZE = 1 << 18
INFO = GangInfo(
    gang_id="virtual",
    model="none",
    device="none",
    dtype="none",
    kernels="none",
    max_model_len=MAX_LEN,
    block_size=BLOCK_SIZE,
    num_pages=1,
    page_bytes=1,
    num_threads=1,
    vocab_size=VOCAB_SIZE,
)


class VirtualCosts:
    """`PlanCosts` of round numbers. Pages that move between tiers take no time."""

    def step_s(self, plan: StepPlan) -> float:
        return 0.02 + 2e-5 * sum([len(part.token_ids) for part in plan.sequences])

    def load_s(self, num_pages: int, *, from_store: bool) -> float:
        return 2e-4 * num_pages

    def move_s(self, num_pages: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Work:
    """Requests of a tenant, one after the other."""

    tenant: str
    num_prompt: int
    num_output: int
    adapters: tuple[str, ...] = ()  # it uses these in turns
    depth: int = 4  # requests that it has waiting or running at any time
    weight: float = 1.0
    num_documents: int = 0  # its prompts begin with one of so many documents, chosen by chance; 0: they share nothing
    document_tokens: int = 0  # of each document; the rest of a prompt is its own


class VirtualGang:
    """A gang that always has more work than it can do."""

    def __init__(
        self,
        work: list[Work],
        limits: GangLimits,
        adapter_pages: int | Mapping[str, int] = 1,
        scheduling: Scheduling = "fair",
        overlaps: bool = True,
    ) -> None:
        """`adapter_pages`: of each adapter, or by adapter."""
        sizes = adapter_pages if isinstance(adapter_pages, Mapping) else defaultdict(lambda: adapter_pages)
        self.executor = VirtualExecutor(VirtualCosts())
        self.scheduler = Scheduler(
            limits, frozenset(), lambda ref: sizes[ref.digest], clock=self.executor.clock, scheduling=scheduling
        )
        self._engine = Engine(self.scheduler, self.executor, INFO, overlaps=overlaps, clock=self.executor.clock)
        self._work: dict[int, Work] = {}  # by sequence
        self._num_submitted: Counter[str] = Counter()
        self._chance = random.Random(0)
        self.num_answers: Counter[str] = Counter()  # by tenant
        self.num_tokens: Counter[str] = Counter()  # generated, by tenant
        self.num_prompt_tokens: Counter[str] = Counter()  # of prompts whose first token has come, by tenant
        self._begun: set[int] = set()
        self._submitted_at_s: dict[int, float] = {}
        self.waits_s: list[float] = []  # of each answer, from its request to its end
        for number in range(max(each.depth for each in work)):
            for each in work:
                if number < each.depth:
                    self._submit(each)

    def run(self, seconds: float) -> None:
        """Steps until this much virtual time has passed."""
        end_s = self.executor.now_s + seconds
        while self.executor.now_s < end_s:
            for update in self._engine.step():
                work = self._work[update.sequence_id]
                if update.token_ids and update.sequence_id not in self._begun:
                    self._begun.add(update.sequence_id)
                    self.num_prompt_tokens[work.tenant] += work.num_prompt
                self.num_tokens[work.tenant] += len(update.token_ids)
                assert update.error is None, update.error
                if update.finish_reason is not None:
                    self.num_answers[work.tenant] += 1
                    self.waits_s.append(self.executor.now_s - self._submitted_at_s[update.sequence_id])
                    self._submit(work)
            self._engine.take_residency_changes()
            if self._engine.waits:
                self.executor.wait(end_s)

    def served(self, tenant: str) -> float:
        """The price of what reached the tenant: prompts whose first token came, and tokens."""
        return self.num_prompt_tokens[tenant] + OUTPUT_TOKEN * self.num_tokens[tenant]

    @property
    def num_needed(self) -> int:
        """Tokens that had to be computed for what reached the tenants."""
        return sum(self.num_prompt_tokens.values()) + sum(self.num_tokens.values()) - len(self._begun)

    def _submit(self, work: Work) -> None:
        number = len(self._work)
        self._work[number], self._submitted_at_s[number] = work, self.executor.now_s
        turn = self._num_submitted[work.tenant]
        self._num_submitted[work.tenant] += 1
        document = list[int]()
        if work.num_documents:
            chosen = self._chance.randrange(work.num_documents)
            document = [VOCAB_SIZE - 1 - chosen, *range(3, work.document_tokens + 2)]
        own = [number % VOCAB_SIZE, *range(2, work.num_prompt + 1)]
        adapter = work.adapters[turn % len(work.adapters)] if work.adapters else None
        self._engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=number,
                    prompt_token_ids=[*document, *own][: work.num_prompt],
                    sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=work.num_output),
                    tenant=work.tenant,
                    weight=work.weight,
                    adapter=None if adapter is None else AdapterRef(adapter, {"q_proj": 8}),
                )
            )
        )
