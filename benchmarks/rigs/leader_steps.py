"""What one step costs the leader: schedule, settle, commit and load, with a worker that takes no time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from motet.benchmarks.rigs.instant_executor import InstantExecutor
from motet.workers.engine import Engine
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits, pages_for
from motet.workers.wire.messages import AdapterRef, GangInfo, SamplingParams, SequenceRequest, Submit

BLOCK_SIZE = 16
CONTEXT = 256  # tokens of a prompt, unless a case is about that
MAX_CONTEXT = 1 << 18
PAGES_OF_ADAPTER = 4
MAX_TOKENS = 8192  # of a step
VOCAB_SIZE = 1 << 18
NUM_ROUNDS = 4
_INFO = GangInfo(
    gang_id="scale",
    model="none",
    device="none",
    dtype="none",
    kernels="none",
    max_model_len=MAX_CONTEXT,
    block_size=BLOCK_SIZE,
    num_pages=1,
    page_bytes=1,
    num_threads=1,
    vocab_size=VOCAB_SIZE,
)


class LeaderSteps:
    """An engine over an `InstantExecutor`."""

    def __init__(self, num_pages: int, max_num_sequences: int, loads_end: bool = True, host_pages: int = 0) -> None:
        limits = GangLimits(MAX_CONTEXT, VOCAB_SIZE, BLOCK_SIZE, num_pages, MAX_TOKENS, max_num_sequences)
        tiers = TierSizes(host_pages)
        self.executor = InstantExecutor(loads_end)
        scheduler = Scheduler(limits, frozenset(), lambda _: PAGES_OF_ADAPTER, tiers=tiers)
        ticks = itertools.count()  # computing takes time, so that it is worth while to bring KV back
        self.engine = Engine(scheduler, self.executor, _INFO, clock=lambda: float(next(ticks)))
        self._next_id = 0

    def submit(self, prompt_token_ids: list[int], adapter: str | None = None, max_tokens: int | None = None) -> None:
        self._next_id += 1
        self.engine.receive(
            Submit(
                SequenceRequest(
                    sequence_id=self._next_id,
                    prompt_token_ids=prompt_token_ids,
                    sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
                    tenant="scale",
                    adapter=None if adapter is None else AdapterRef(adapter, {"q_proj": 8}),
                )
            )
        )

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self.step()

    def step_ms(self) -> float:
        """CPU milliseconds of the leader's thread for a step, of the steps that take one page of each sequence.

        The least of several such rounds: what else runs on the machine takes its share of the caches.
        """
        rounds_s = []
        for _ in range(NUM_ROUNDS):
            began_s, others_s = time.thread_time(), self.executor.cpu_s
            for _ in range(BLOCK_SIZE):
                self.step()
            rounds_s.append(time.thread_time() - began_s - (self.executor.cpu_s - others_s))
        return min(rounds_s) / BLOCK_SIZE * 1e3

    def step(self) -> None:
        self.engine.step()
        self.engine.take_residency_changes()
        self.engine.load()


def own_prompt(number: int, num_tokens: int) -> list[int]:
    """A prompt that begins like no other."""
    return [number % VOCAB_SIZE, number // VOCAB_SIZE, *range(2, num_tokens)][:num_tokens]


def step_with(num_running: int, num_waiting: int = 0) -> float:
    """Milliseconds of a step in which so many decode; as many others wait, each for an adapter that does not come."""
    pages_each = pages_for(CONTEXT + 2 * NUM_ROUNDS * BLOCK_SIZE, BLOCK_SIZE) + 1
    num_pages = num_running * pages_each + 64 * PAGES_OF_ADAPTER
    steps = LeaderSteps(num_pages, num_running + 16, loads_end=False)
    for number in range(num_running):
        steps.submit(own_prompt(number, CONTEXT))
    steps.step_until(lambda: steps.engine.load().gauges.num_running == num_running)
    for number in range(num_waiting):
        steps.submit(own_prompt(num_running + number, CONTEXT), adapter=f"adapter-{number}")
    _pass(steps, 4)
    return steps.step_ms()


def decoding_step(num_requests: int, num_tokens: int) -> float:
    """Milliseconds of a step in which so many sequences decode that all begin with one document of this length."""
    steps = LeaderSteps(pages_for(num_tokens, BLOCK_SIZE) + num_requests * 16, num_requests)
    document = own_prompt(0, num_tokens)
    for number in range(num_requests):
        steps.submit([*document, *own_prompt(number, 8)])
    steps.step_until(lambda: steps.engine.load().gauges.num_running == num_requests)
    _pass(steps, 4)
    return steps.step_ms()


def coming_document_step(num_requests: int, num_tokens: int) -> float:
    """Milliseconds of a step in which so many sequences wait for one document, which comes from host memory."""
    num_pages = pages_for(num_tokens, BLOCK_SIZE) + num_requests * 16
    steps = LeaderSteps(num_pages, num_requests + 1, host_pages=4 * num_pages)
    document = own_prompt(0, num_tokens)
    for prompt in (document, own_prompt(1, num_pages * BLOCK_SIZE)):  # the second takes the whole pool
        steps.submit(prompt, max_tokens=1)
        steps.step_until(lambda: not steps.engine.has_work())
    steps.executor.moves_end = False
    steps.submit(own_prompt(3, 8))
    for number in range(num_requests):
        steps.submit([*document, *own_prompt(4 + number, 8)])
    _pass(steps, 4)
    gauges = steps.engine.load().gauges
    assert (gauges.num_running, gauges.num_waiting) == (1, num_requests), "the document has come, or is computed"
    return steps.step_ms()


def _pass(steps: LeaderSteps, num_steps: int) -> None:
    for _ in range(num_steps):
        steps.step()
