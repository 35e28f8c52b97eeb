"""A trace on an engine: the real one as time passes, or the same engine over an executor that computes nothing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec

from ..engine import Engine
from ..plan import MoveEnd, SampledToken, StepPlan, StepResult
from ..wire.messages import AdapterRef, SamplingParams, SequenceRequest, Submit

# A load as a trace: one JSON object a line, with a request's arrival, lengths, adapter and tenant.
#
#     {"arrival_s": 0.25, "prompt_tokens": 120, "output_tokens": 64, "adapter": "acme/support", "tenant": "acme"}
#
# Without `adapter` a request is for the base; all requests without `tenant` are of one tenant.

MOST_TOKENS = 1 << 31  # of a prompt or an answer


class TracedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: str | None = None
    tenant: str = "trace"

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < float("inf"):
            raise ValueError(f"arrival_s = {self.arrival_s}: it must be 0 or more, and finite")
        if min(self.prompt_tokens, self.output_tokens) < 1 or max(self.prompt_tokens, self.output_tokens) > MOST_TOKENS:
            raise ValueError(
                f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens: each must be from "
                f"1 to {MOST_TOKENS}"
            )


def read_trace(path: Path) -> tuple[TracedRequest, ...]:
    """Requests in the order of their arrival. Raises ValueError for a line that is not a request, or without any."""
    decoder = msgspec.json.Decoder(TracedRequest)
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                requests.append(decoder.decode(line))
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise ValueError(f"{path} has no requests")
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


_TOKEN = 1  # that every sequence gets in every step of virtual time


class PlanCosts(Protocol):
    """What a plan takes, in seconds."""

    def step_s(self, plan: StepPlan) -> float: ...

    def load_s(self, num_pages: int, *, from_store: bool) -> float: ...

    def move_s(self, num_pages: int) -> float: ...


class VirtualExecutor:
    """An `Executor` with a clock that only its steps and waits move.

    Adapters are copied one after the other beside the steps, and so are pages of KV. Host memory is taken to hold each
    adapter from its first load on.
    """

    feeds_tokens = False

    def __init__(self, costs: PlanCosts) -> None:
        self._costs = costs
        self._plan: StepPlan | None = None
        self._loads: deque[tuple[float, str]] = deque()  # under way: when each ends
        self._moves: deque[tuple[float, MoveEnd]] = deque()
        self._hosted: set[str] = set()
        self.now_s = 0.0
        self.num_computed = 0  # tokens
        self.num_steps = 0

    def begin(self, plan: StepPlan) -> None:
        self._plan = plan
        for load in plan.loads:
            digest, num_pages = load.residence.digest, len(load.residence.pages)
            begins_s = max(self.now_s, self._loads[-1][0] if self._loads else 0.0)
            took_s = self._costs.load_s(num_pages, from_store=digest not in self._hosted)
            self._hosted.add(digest)
            self._loads.append((begins_s + took_s, digest))
        for move in plan.moves:
            begins_s = max(self.now_s, self._moves[-1][0] if self._moves else 0.0)
            took_s = self._costs.move_s(len(move.source_pages))
            self._moves.append((begins_s + took_s, MoveEnd(move.number, took_s, None)))

    def finish(self) -> StepResult:
        assert self._plan is not None
        plan, self._plan = self._plan, None
        if plan.sequences:
            self.num_computed += sum([len(part.token_ids) for part in plan.sequences])
            self.num_steps += 1
            self.now_s += self._costs.step_s(plan)
        chosen = SampledToken(_TOKEN, None)
        tokens: dict[int, SampledToken | None] = {
            part.sequence_id: chosen for part in plan.sequences if part.sample is not None
        }
        loaded, moved = list[str](), list[MoveEnd]()
        while self._loads and self._loads[0][0] <= self.now_s:
            loaded.append(self._loads.popleft()[1])
        while self._moves and self._moves[0][0] <= self.now_s:
            moved.append(self._moves.popleft()[1])
        return StepResult(plan.step, tokens, tuple(loaded), (), tuple(moved))

    def clock(self) -> float:
        return self.now_s

    def wait(self, until_s: float) -> None:
        """Nothing is computed until a copy ends, or until this time if that is earlier."""
        ends = [copies[0][0] for copies in (self._loads, self._moves) if copies]
        until_s = min([until_s, *ends])
        if until_s == float("inf"):
            raise RuntimeError("the engine waits, and no copy is under way")
        self.now_s = max(self.now_s, until_s)

    def wake_on_copy_end(self, wake: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


@dataclass
class Replayed:
    """What a trace gave. Times are by the clock that drove it."""

    seconds: float = 0.0  # to the end of the last answer
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)  # from arrival, of each request that got one
    token_interval_s: list[float] = field(default_factory=list)  # mean of each answer of two tokens or more
    refused: dict[str, int] = field(default_factory=dict)  # by message
    num_preemptions: int = 0
    most_running: int = 0
    most_used_pages: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def median_first_token_s(self) -> float:
        return median(self.first_token_s)

    def add(self, other: Replayed) -> None:
        """Adds what another gang gave at the same time."""
        self.seconds = max(self.seconds, other.seconds)
        self.num_output_tokens += other.num_output_tokens
        self.num_prompt_tokens += other.num_prompt_tokens
        self.first_token_s += other.first_token_s
        self.token_interval_s += other.token_interval_s
        self.num_preemptions += other.num_preemptions
        self.most_running = max(self.most_running, other.most_running)
        self.most_used_pages = max(self.most_used_pages, other.most_used_pages)
        for message, count in other.refused.items():
            self.refuse(message, count)

    def refuse(self, message: str, count: int = 1) -> None:
        self.refused[message] = self.refused.get(message, 0) + count


def replay(
    engine: Engine,
    requests: Sequence[TracedRequest],
    refs: Mapping[str, AdapterRef],
    clock: Callable[[], float],
    wait: Callable[[float], None],
    first_id: int = 0,
) -> Replayed:
    """Submits each request when it arrives, and steps the engine until all have ended.

    `refs`: of the trace's adapters. `wait(until_s)`: returns then, or before where something may have happened.
    `first_id`: of the sequences. Prompts are random and differ with it, so none shares a prefix with another; answers
    have the length of the trace.
    """
    chance = random.Random(first_id)
    arrivals = deque(sorted(requests, key=lambda request: request.arrival_s))
    begun_at, last_at, stats = clock(), 0.0, Replayed()
    open_: dict[int, _Answer] = {}
    number = first_id
    before = engine.load().counters.num_preemptions
    while arrivals or engine.has_work():
        now = clock() - begun_at
        while arrivals and arrivals[0].arrival_s <= now:
            request = arrivals.popleft()
            if request.prompt_tokens > engine.info.max_model_len:  # however many they are, they are not made
                stats.refuse(f"a prompt is longer than the context of {engine.info.max_model_len} tokens")
                continue
            open_[number] = _Answer(request)
            engine.receive(Submit(_sequence(number, request, refs, chance, engine.info.vocab_size)))
            number += 1
        if not engine.has_work():
            if arrivals:
                wait(begun_at + arrivals[0].arrival_s)
            continue
        updates = engine.step()
        now = clock() - begun_at
        for update in updates:
            answer = open_[update.sequence_id]
            if update.error is not None:
                stats.refuse(update.error.message)
                del open_[update.sequence_id]
                continue
            if update.token_ids:
                if answer.first_at is None:
                    answer.first_at = now
                    stats.first_token_s.append(now - answer.request.arrival_s)
                    stats.num_prompt_tokens += answer.request.prompt_tokens
                answer.num_tokens += len(update.token_ids)
                stats.num_output_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                last_at = now
                if answer.num_tokens > 1 and answer.first_at is not None:
                    stats.token_interval_s.append((now - answer.first_at) / (answer.num_tokens - 1))
                del open_[update.sequence_id]
        engine.take_residency_changes()
        gauges = engine.load().gauges
        stats.most_running = max(stats.most_running, gauges.num_running)
        stats.most_used_pages = max(stats.most_used_pages, gauges.num_pages - gauges.num_free_pages)
        if engine.waits:
            wait(begun_at + arrivals[0].arrival_s if arrivals else float("inf"))
    stats.num_preemptions = engine.load().counters.num_preemptions - before
    stats.seconds = last_at
    return stats


@dataclass
class _Answer:
    request: TracedRequest
    first_at: float | None = None
    num_tokens: int = 0


def _sequence(
    number: int, request: TracedRequest, refs: Mapping[str, AdapterRef], chance: random.Random, vocab_size: int
) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=number,
        prompt_token_ids=chance.choices(range(vocab_size), k=request.prompt_tokens),
        sampling=SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True),
        tenant=request.tenant,
        adapter=None if request.adapter is None else refs[request.adapter],
    )
