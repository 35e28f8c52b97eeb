"""What single calls of a gang's leader cost when memory is full: CPU time of its thread, on the real scheduler.

It uses only the scheduler's constructor and public calls, so it also runs on earlier versions.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from motet.cluster.replicas.replica_start import keep_pauses_short
from motet.workers.plan import HostAdapterStats, MoveEnd, SampledToken, StepPlan, StepResult
from motet.workers.scheduling.scheduler import Scheduler
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import AdapterRef, SamplingParams, SequenceRequest

BLOCK_SIZE = 16
VOCAB_SIZE = 1 << 18
LONG = 120_000  # tokens
REPEATS = 5
Figures = TypeVar("Figures")
TOKEN_INTERVAL_S = 0.05


class Leader:
    """A scheduler whose plans are computed at once. `longest_s`: CPU seconds of the longest turn so far."""

    def __init__(self, num_pages: int, num_sequences: int, max_tokens: int = 8192, host_pages: int = 0) -> None:
        limits = GangLimits(1 << 18, VOCAB_SIZE, BLOCK_SIZE, num_pages, max_tokens, num_sequences)
        self.scheduler = Scheduler(limits, frozenset(), lambda _: 4, tiers=TierSizes(host_pages))
        self.moves_end = True
        self.longest_s = 0.0
        self.num_ids = 0

    def add(self, prompt_token_ids: list[int], max_tokens: int | None = None, tenant: str = "scarce") -> int:
        self.num_ids += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        request = SequenceRequest(
            sequence_id=self.num_ids, prompt_token_ids=prompt_token_ids, sampling=sampling, tenant=tenant
        )
        assert self.scheduler.add(request, 0) is None
        return self.num_ids

    def turn(self, receive: Callable[[], object] = lambda: None) -> float:
        """What the leader does between two steps, and its CPU seconds: `receive`, then a step."""
        scheduler = self.scheduler
        began_s = time.thread_time()
        receive()
        plan = scheduler.schedule()
        planned_s = time.thread_time()
        result = _result(plan, self.moves_end)
        computed_s = time.thread_time()
        scheduler.observe(plan, 1.0)  # computing takes long, so that it is worth while to bring KV back
        scheduler.commit(plan, result)
        scheduler.load()
        scheduler.take_residency_changes()
        seconds = time.thread_time() - began_s - (computed_s - planned_s)
        self.longest_s = max(self.longest_s, seconds)
        return seconds

    def finish(self) -> None:
        while self.scheduler.has_work():
            self.turn()

    def turn_until_running(self, number: int) -> None:
        while self.scheduler.load().gauges.num_running < number or self.scheduler.load().gauges.num_queued_tokens > (
            number
        ):
            self.turn()


def own_prompt(number: int, num_tokens: int) -> list[int]:
    """A prompt that begins like no other."""
    return [number % VOCAB_SIZE, number // VOCAB_SIZE, *[2 + (number + i) % 50_000 for i in range(num_tokens)]][
        :num_tokens
    ]


def run_others(leader: Leader, number: int) -> None:
    """Short sequences that decode meanwhile."""
    for each in range(number):
        leader.add(own_prompt(10_000 + each, 32), max_tokens=4000)
    leader.turn()


def waiting_for_a_document_ms(num_tokens: int, host_tier: bool, is_full: bool = False) -> float:
    """The median turn while 126 sequences wait for a document whose last third is being computed for another.

    `is_full`: the gang has no seat for them.
    """
    num_pages = num_tokens // BLOCK_SIZE + 4096
    leader = Leader(num_pages, 1 if is_full else 128, 2048, 4 * num_pages if host_tier else 0)
    leader.add(own_prompt(1, 40 * BLOCK_SIZE), max_tokens=1)
    leader.finish()  # the tier holds something, so looking there is worth while
    document = own_prompt(0, num_tokens)
    for number in range(127):
        leader.add([*document, *own_prompt(number, 8)], max_tokens=4)
    times = [leader.turn() for _ in range(num_tokens // 2048)]
    assert leader.scheduler.load().gauges.num_waiting == 126
    last = sorted(times[-len(times) // 3 :])
    return last[len(last) // 2] * 1e3


def bringing_a_document_ms(num_tokens: int) -> float:
    """The longest turn while a document comes from the host tier for 127 sequences."""
    num_pages = num_tokens // BLOCK_SIZE + 4096
    leader = Leader(num_pages, 128, 8192, 4 * num_pages)
    document = own_prompt(0, num_tokens)
    leader.add([*document, 5], max_tokens=1)
    leader.finish()
    leader.add(own_prompt(1, num_pages * BLOCK_SIZE - 64), max_tokens=1)  # takes the whole pool
    leader.finish()
    leader.longest_s = 0.0
    for number in range(127):
        leader.add([*document, *own_prompt(number, 8)], max_tokens=4)
    leader.finish()
    return leader.longest_s * 1e3


def start_and_end_of_a_long_one_ms() -> dict[str, float]:
    """Turns in which a sequence of 120k tokens arrives, starts in a pool full of kept pages, and ends."""
    long_pages = LONG // BLOCK_SIZE + 8
    leader = Leader(long_pages + 512, 16)
    for number in range(1, 9):  # full of pages that are kept for no sequence
        leader.add(own_prompt(number, (long_pages + 512) * BLOCK_SIZE // 8 - 64), max_tokens=1)
        leader.finish()
    run_others(leader, 8)
    prompt = own_prompt(0, LONG)
    long = 0

    def arrive() -> None:
        nonlocal long
        began_s = time.thread_time()
        long = leader.add(prompt, max_tokens=1000)
        figures["arrival"] = (time.thread_time() - began_s) * 1e3

    figures: dict[str, float] = {}
    leader.longest_s = 0.0
    leader.turn(arrive)
    for _ in range(LONG // 8192 + 24):
        leader.turn()
    figures["start"] = leader.longest_s * 1e3
    leader.longest_s = 0.0
    leader.turn(lambda: leader.scheduler.cancel(long))
    for _ in range(100):
        leader.turn()
    figures["end"] = leader.longest_s * 1e3
    leader.scheduler.check_integrity()
    return figures


def cancels_ms() -> float:
    """The longest turn when 128 running sequences of 8k are cancelled at once."""
    leader = Leader(128 * 1024, 136)  # with room for pages that are kept back
    ids = [leader.add(own_prompt(number, 8 * 1024), max_tokens=1000) for number in range(128)]
    run_others(leader, 8)
    leader.turn_until_running(136)
    leader.longest_s = 0.0
    leader.turn(lambda: [leader.scheduler.cancel(one) for one in ids])
    for _ in range(100):
        leader.turn()
    leader.scheduler.check_integrity()
    return leader.longest_s * 1e3


def arrivals_of_adopted_ms() -> float:
    """The longest turn when another sequence of the same 120k tokens arrives while the first one runs."""
    leader = Leader(2 * LONG // BLOCK_SIZE, 16)
    prompt = own_prompt(0, LONG)
    leader.add(prompt, max_tokens=1000)
    leader.turn_until_running(1)
    leader.longest_s = 0.0
    leader.turn(lambda: leader.add([*prompt, 7], max_tokens=10))
    for _ in range(4):
        leader.turn()
    return leader.longest_s * 1e3


def starts_on_a_document_ms(num_tokens: int = LONG) -> float:
    """The longest turn while 127 sequences start that begin with a document in the pool, beside others that decode."""
    leader = Leader(num_tokens // BLOCK_SIZE + 8192, 256)
    document = own_prompt(0, num_tokens)
    leader.add([*document, 5], max_tokens=1)
    leader.finish()
    run_others(leader, 8)
    for number in range(127):
        leader.add([*document, *own_prompt(number, 8)], max_tokens=1000)
    leader.longest_s = 0.0
    leader.turn_until_running(135)
    leader.scheduler.check_integrity()
    return leader.longest_s * 1e3


def preempted_on_a_document_ms(num_tokens: int = LONG) -> float:
    """The longest turn while new tenants' sequences preempt some of the 127 that run on a document in a full pool."""
    leader = Leader(num_tokens // BLOCK_SIZE + 2500, 256)
    document = own_prompt(0, num_tokens)
    leader.add([*document, 5], max_tokens=1)
    leader.finish()
    for number in range(4):
        leader.add(own_prompt(900 + number, 6000), max_tokens=3000, tenant="others")
    for number in range(127):
        leader.add([*document, *own_prompt(5000 + number, 8)], max_tokens=200)
    for _ in range(140):  # one starts in each
        leader.turn()
    for number in range(6):
        leader.add(own_prompt(40_000 + number, 9000), max_tokens=4, tenant=f"new-{number}")
    leader.longest_s = 0.0
    for _ in range(200):
        leader.turn()
    assert leader.scheduler.load().counters.num_preemptions
    leader.scheduler.check_integrity()
    return leader.longest_s * 1e3


def step_ms(num_running: int = 256) -> float:
    """A turn with this many decodes: the mean over a page's worth of steps."""
    leader = Leader(num_running * 512, num_running)  # with room for pages that are kept back
    for number in range(num_running):
        leader.add(own_prompt(number, 256), max_tokens=4000)
    leader.turn_until_running(num_running)
    return sum(leader.turn() for _ in range(BLOCK_SIZE)) / BLOCK_SIZE * 1e3


def worst_step_over_interval(max_tokens: int, seed: int = 1, num_steps: int = 1500) -> float:
    """In virtual time: the longest step with decodes over the token interval's target, after as many steps of warm-up.

    A prompt token's time grows with its context. Prompts are short ones, questions about documents that are kept, and
    long ones that are new, beside sequences of another tenant that decode.
    """
    rng, token_s = random.Random(seed), 0.025 / max_tokens
    limits = GangLimits(1 << 18, VOCAB_SIZE, BLOCK_SIZE, 60_000, max_tokens, 64)
    scheduler = Scheduler(limits, frozenset(), lambda _: 4, token_interval_s=TOKEN_INTERVAL_S)
    documents = [own_prompt(number, 30_000 * (number + 1)) for number in range(4)]
    longest_s, num_ids = 0.0, 0

    def add(prompt_token_ids: list[int], num_new: int, tenant: str = "scarce") -> None:
        nonlocal num_ids
        num_ids += 1
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_new)
        request = SequenceRequest(
            sequence_id=num_ids, prompt_token_ids=prompt_token_ids, sampling=sampling, tenant=tenant
        )
        assert scheduler.add(request, 0) is None

    for step in range(2 * num_steps):
        if step % 400 == 0:
            for _ in range(8):
                add(own_prompt(1000 + num_ids, 64), 600, "streams")
        if step % 1500 == 100:
            add(own_prompt(1000 + num_ids, 60_000), 8)
        if rng.random() < 0.15:
            add(own_prompt(1000 + num_ids, rng.randrange(200, 3000)), 20)
        if rng.random() < 0.02 or step in (10, 20, 30, 40):
            add([*documents[rng.randrange(4)], *own_prompt(1000 + num_ids, rng.randrange(200, 3000))], 20)
        plan = scheduler.schedule()
        seconds, num_decodes = 0.005, 0
        for part in plan.sequences:
            number = len(part.token_ids)
            if number == 1:
                num_decodes += 1
            else:
                seconds += number * token_s * (1 + (part.start + number / 2) / 16_000)
        seconds = (seconds + 1e-4 * num_decodes) * rng.uniform(0.97, 1.03)
        scheduler.observe(plan, seconds)
        scheduler.commit(plan, _result(plan, True))
        if step >= num_steps and num_decodes:
            longest_s = max(longest_s, seconds)
    return longest_s / TOKEN_INTERVAL_S


def second_generation_ms() -> float:
    """The median time of the collector's searches of its second generation while prompts of 8k fill a large pool."""
    keep_pauses_short()
    seconds: list[float] = []
    began_s = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.thread_time()
        elif info["generation"] == 1:
            seconds.append(time.thread_time() - began_s)

    gc.callbacks.append(note)
    gc.enable()
    leader = Leader(200_000, 136, host_pages=50_000)
    for number in range(3 * 128):
        leader.add(own_prompt(number, 8 * 1024), max_tokens=60)
    leader.finish()
    gc.callbacks.remove(note)
    return sorted(seconds)[len(seconds) // 2] * 1e3


def host_loads_beside_hanging_reads() -> int:
    """How many of 4 adapters in host memory begin to load within 8 steps while 8 reads of the store hang."""
    limits = GangLimits(1 << 18, VOCAB_SIZE, BLOCK_SIZE, 4096, 512, 64)
    scheduler = Scheduler(limits, frozenset(), lambda _: 4)
    hosted = tuple(f"hosted-{number}" for number in range(4))
    plan = scheduler.schedule()
    scheduler.commit(plan, StepResult(plan.step, {}, (), (), (), HostAdapterStats(came=hosted)))
    for number, digest in enumerate((*(f"hanging-{number}" for number in range(8)), *hosted)):
        sampling = SamplingParams(max_tokens=4)
        request = SequenceRequest(
            sequence_id=number,
            prompt_token_ids=[5, 6],
            sampling=sampling,
            tenant="scarce",
            adapter=AdapterRef(digest, {"q_proj": 8}),
        )
        assert scheduler.add(request, 0) is None
    num_begun = 0
    for _ in range(8):
        plan = scheduler.schedule()
        num_begun += sum(load.residence.digest in hosted for load in plan.loads)
        scheduler.commit(plan, StepResult(plan.step, {}, (), ()))
    return num_begun


def measure() -> dict[str, float]:
    """Milliseconds are the least of several repeats; `longest_call_ms`: the worst of the calls."""
    figures: dict[str, float] = {}

    def least(name: str, one: Callable[[], float], repeats: int = REPEATS) -> None:
        figures[name] = round(min(_quiet(one) for _ in range(repeats)), 3)

    for length in (32_000, LONG):
        for tier in (False, True):
            name = f"document_of_{length // 1000}k_tier_{'on' if tier else 'off'}_ms"
            least(name, partial(waiting_for_a_document_ms, length, tier), 2)
    least("document_of_120k_full_gang_ms", lambda: waiting_for_a_document_ms(LONG, True, is_full=True), 2)
    least("document_of_32k_comes_ms", lambda: bringing_a_document_ms(32_000), 2)
    parts = [_quiet(start_and_end_of_a_long_one_ms) for _ in range(REPEATS)]
    for name in parts[0]:
        figures[f"{name}_of_120k_ms"] = round(min(part[name] for part in parts), 3)
    least("arrival_of_known_120k_ms", arrivals_of_adopted_ms, 2)
    least("cancels_of_128_ms", cancels_ms, 3)
    least("starts_of_127_on_120k_ms", starts_on_a_document_ms, 2)
    least("preempted_on_120k_ms", preempted_on_a_document_ms, 2)
    least("step_of_256_ms", step_ms, 3)
    figures["second_generation_ms"] = round(second_generation_ms(), 3)
    figures["host_loads_beside_hanging_reads"] = host_loads_beside_hanging_reads()
    for max_tokens in (512, 2048):
        figures[f"worst_step_of_{max_tokens}_over_interval"] = round(worst_step_over_interval(max_tokens), 3)
    of_120k = [f"{name}_of_120k_ms" for name in ("arrival", "start", "end")]
    shared = ("starts_of_127_on_120k_ms", "preempted_on_120k_ms")
    calls = (*of_120k, *shared, "second_generation_ms", "cancels_of_128_ms")
    return figures | {"longest_call_ms": max(figures[name] for name in calls)}


def _quiet(one: Callable[[], Figures]) -> Figures:
    """Garbage is not collected meanwhile."""
    gc.collect()
    gc.disable()
    try:
        return one()
    finally:
        gc.enable()


def _result(plan: StepPlan, moves_end: bool) -> StepResult:
    chosen = SampledToken(7, None)
    tokens: dict[int, SampledToken | None] = {
        part.sequence_id: chosen for part in plan.sequences if part.sample is not None
    }
    loaded = tuple(load.residence.digest for load in plan.loads)
    moved = tuple(MoveEnd(move.number, 0.001, None) for move in plan.moves) if moves_end else ()
    return StepResult(plan.step, tokens, loaded, (), moved)


if __name__ == "__main__":
    for name, figure in measure().items():
        print(f"{name:40} {figure:10.3f}")
