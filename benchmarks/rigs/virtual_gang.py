"""A gang in virtual time: the real engine and scheduler over an executor that computes nothing and knows its costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from motet.workers.engine import Engine
from motet.workers.fairness.prices import OUTPUT_TOKEN
from motet.workers.fairness.tenant_counters import Scheduling
from motet.workers.plan import MoveEnd, SampledToken, StepPlan, StepResult
from motet.workers.scheduling.request_limits import GangLimits
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.wire.messages import AdapterRef, GangInfo, SamplingParams, SequenceRequest, Submit

BLOCK_SIZE = 16
MAX_LEN = 1 << 17
VOCAB_SIZE = 1 << 18
_TOKEN = 1  # that every sequence gets in every step
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


@dataclass(frozen=True)
class VirtualCosts:
    """What a step takes, in seconds of virtual time."""

    step_s: float = 0.02
    token_s: float = 2e-5
    load_page_s: float = 2e-4  # adapters are copied one after the other, beside the steps


class VirtualExecutor:
    """An `Executor` with a clock that only its steps move."""

    feeds_tokens = False

    def __init__(self, costs: VirtualCosts) -> None:
        self._costs = costs
        self._plan: StepPlan | None = None
        self._loads: list[tuple[float, str]] = []  # under way: when each ends
        self.now_s = 0.0
        self.num_computed = 0  # tokens

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        for load in plan.loads:
            begins_s = self._loads[-1][0] if self._loads else self.now_s
            ends_s = begins_s + self._costs.load_page_s * len(load.residence.pages)
            self._loads.append((ends_s, load.residence.digest))

    def finish(self) -> StepResult:
        assert self._plan is not None
        plan, self._plan = self._plan, None
        num_tokens = sum([len(part.token_ids) for part in plan.sequences])
        self.num_computed += num_tokens
        if plan.sequences:
            self.now_s += self._costs.step_s + self._costs.token_s * num_tokens
        elif self._loads:
            self.now_s = max(self.now_s, self._loads[0][0])  # nothing to do until then
        loaded = tuple([digest for ends_s, digest in self._loads if ends_s <= self.now_s])
        self._loads = self._loads[len(loaded) :]
        chosen = SampledToken(_TOKEN, None)
        tokens: dict[int, SampledToken | None] = {
            part.sequence_id: chosen for part in plan.sequences if part.sample is not None
        }
        moved = tuple([MoveEnd(move.number, 0.0, None) for move in plan.moves])
        return StepResult(plan.step, tokens, loaded, (), moved)

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Work:
    """What a tenant asks for, again and again."""

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
        adapter_pages: int = 1,
        scheduling: Scheduling = "fair",
        costs: VirtualCosts | None = None,
    ) -> None:
        self.executor = VirtualExecutor(costs or VirtualCosts())
        self.scheduler = Scheduler(
            limits,
            frozenset(),
            lambda _: adapter_pages,
            clock=lambda: self.executor.now_s,
            scheduling=scheduling,
        )
        self._engine = Engine(self.scheduler, self.executor, INFO, clock=lambda: self.executor.now_s)
        self._work: dict[int, Work] = {}  # by sequence
        self._num_asked: Counter[str] = Counter()
        self._chance = random.Random(0)
        self.num_answers: Counter[str] = Counter()  # by tenant
        self.num_tokens: Counter[str] = Counter()  # generated, by tenant
        self.num_prompt_tokens: Counter[str] = Counter()  # of prompts whose first token has come, by tenant
        self._begun: set[int] = set()
        self._asked_at_s: dict[int, float] = {}
        self.waits_s: list[float] = []  # of each answer, from its request to its end
        for number in range(max(each.depth for each in work)):
            for each in work:
                if number < each.depth:
                    self._ask(each)

    def run(self, seconds: float) -> None:
        """Steps until this much virtual time has passed, or nothing moves any more."""
        end_s, num_idle = self.executor.now_s + seconds, 0
        while self.executor.now_s < end_s and num_idle < 1000:
            before_s = self.executor.now_s
            for update in self._engine.step():
                work = self._work[update.sequence_id]
                if update.token_ids and update.sequence_id not in self._begun:
                    self._begun.add(update.sequence_id)
                    self.num_prompt_tokens[work.tenant] += work.num_prompt
                self.num_tokens[work.tenant] += len(update.token_ids)
                assert update.error is None, update.error
                if update.finish_reason is not None:
                    self.num_answers[work.tenant] += 1
                    self.waits_s.append(self.executor.now_s - self._asked_at_s[update.sequence_id])
                    self._ask(work)
            num_idle = num_idle + 1 if self.executor.now_s == before_s else 0
            self._engine.take_residency_changes()

    def served(self, tenant: str) -> float:
        """The price of what reached the tenant: prompts whose first token came, and tokens."""
        return self.num_prompt_tokens[tenant] + OUTPUT_TOKEN * self.num_tokens[tenant]

    @property
    def num_needed(self) -> int:
        """Tokens that had to be computed for what reached the tenants."""
        return sum(self.num_prompt_tokens.values()) + sum(self.num_tokens.values()) - len(self._begun)

    def _ask(self, work: Work) -> None:
        number = len(self._work)
        self._work[number], self._asked_at_s[number] = work, self.executor.now_s
        turn = self._num_asked[work.tenant]
        self._num_asked[work.tenant] += 1
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
