"""Fair scheduling when memory is short: work advances, charges are what was computed, only ratios of weights matter."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet.benchmarks.rigs import virtual_gang
from motet.benchmarks.rigs.virtual_gang import VirtualGang, Work
from motet.benchmarks.scarce.fair_adapters import AdapterMix, fair_adapters
from motet.benchmarks.scarce.long_prompts import long_prompts, shares_of_long_and_short
from motet.tests.rigs.scheduler_rig import Worker, asking, limits, scheduler
from motet.tests.workers.test_fair_scheduling import Gang
from motet.workers.fairness.tenant_counters import CACHED_TOKEN, OUTPUT_TOKEN, SCORED_TOKEN, load_price
from motet.workers.memory.paged_memory import AdapterState
from motet.workers.plan import INT32_BYTES
from motet.workers.scheduling.growing_sequence import GrowingSequence
from motet.workers.scheduling.running_sequences import PlannedChunk
from motet.workers.scheduling.tier_traffic import TierSizes
from motet.workers.window_pages import GangLimits
from motet.workers.wire.messages import SamplingParams

BLOCK_SIZE = 4
_MOST_IDLE = 40  # steps: each load ends with a chance of 0.4 a step


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    num_tenants=st.integers(2, 24),
    adapter_pages=st.integers(1, 9),
    room=st.floats(1.3, 6.0),
    num_places=st.integers(1, 8),
    weight_of=st.sampled_from([lambda number: 1.0, lambda number: 10.0 ** (number % 5 - 2)]),
)
def test_a_loaded_adapter_stays_until_its_sequence_has_started(
    seed: int, num_tenants: int, adapter_pages: int, room: float, num_places: int, weight_of: object
) -> None:
    """Tenants with an adapter or two each, which do not fit together: in a few steps at most something is computed."""
    rng = random.Random(seed)
    # A tenant's sequences change no places, so one may evict another's adapter; and those that grow may evict any.
    has_two_and_grows = rng.random() < 0.3
    num_least = adapter_pages + (6 if has_two_and_grows else 2)
    gang = Gang(limits(max(num_least, int(room * adapter_pages)), 16, num_places), rng)
    memory, waiting, num_idle = gang.scheduler.memory, gang.scheduler._waiting, 0

    def evicted(digest: str) -> None:
        assert has_two_and_grows or digest not in waiting._loaded_for, (
            "evicted before the sequence that it was loaded for has started"
        )
        waiting.adapter_evicted(digest)

    memory._adapter_went = evicted
    for step in range(100):
        for number in range(num_tenants):
            if rng.random() < 0.2 and len(gang.live(f"t{number}")) < 3:
                num_pages = rng.randint(adapter_pages, adapter_pages + has_two_and_grows)
                adapter = f"{chr(97 + number)}{num_pages}"
                num_prompt = rng.randint(1, 6)
                most = -num_prompt % 4 + 1  # so that it computes no more than the pages hold that it starts on
                most += rng.randint(0, 10) if has_two_and_grows else 0
                gang.add(f"t{number}", num_prompt, most, adapter, weight=weight_of(number))  # type: ignore[operator]
        gang.step()
        num_idle = 0 if gang.executor.plan.sequences or not gang.engine.has_work() else num_idle + 1
        assert num_idle < _MOST_IDLE, "nothing is computed"
        if step % 50 == 0:
            gang.scheduler.check_integrity()
    most_steps = 100 + 60 * (len(gang.requests) + 10)
    while gang.engine.has_work():
        gang.step()
        assert gang.num_steps < most_steps, "no end"
    assert gang.ended == gang.requests.keys()


def test_adapters_that_fill_the_pool_together_stay_for_none_if_nothing_runs() -> None:
    """Those of two sequences of a tenant, the second of more priority, were loaded while another held the place."""
    of = limits(10, num_sequences=1)
    s, worker = scheduler(of), Worker(of)

    def add(sequence_id: int, num_prompt: int, adapter: str | None, tenant: str, priority: int = 0) -> None:
        requested = asking(sequence_id, [10 + sequence_id] * num_prompt, 4, adapter, tenant)
        assert s.add(msgspec.structs.replace(requested, priority=priority), 0) is None

    def step() -> set[int]:
        plan = s.schedule()
        updates = s.commit(plan, worker.execute(plan))
        s.check_integrity()
        return {update.sequence_id for update in updates if update.finish_reason}

    add(0, 5, None, "a")
    step()
    add(1, 9, "a4", "a")
    step()
    add(2, 9, "b4", "a", priority=5)
    assert not step()
    assert [s._adapters.state(digest) for digest in ("a4", "b4")] == [AdapterState.RESIDENT] * 2
    add(3, 33, None, "b")
    ended = set[int]()
    for _ in range(60):
        ended |= step()
    assert ended == {0, 1, 2, 3}


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), tiers=st.sampled_from([TierSizes(), TierSizes(60)]))
def test_all_end_whatever_they_share_and_lack(seed: int, tiers: TierSizes) -> None:
    """Tenants, weights, priorities, background work, adapters and prefixes at random, on few pages."""
    rng = random.Random(seed)
    of = limits(rng.randint(12, 40), rng.choice([4, 16, 64]), rng.randint(1, 6))
    s, worker = scheduler(of, tiers), Worker(of, slow_loads=rng)
    worker.sequence_of = s._running.by_id.__getitem__
    for step in range(2000):
        if step < 60 and rng.random() < 0.7:
            tenant = rng.choice("abcdef")
            adapter = rng.choice([None, *(f"{letter}{rng.choice([1, 1, 4])}" for letter in "abcdefghijkl")])
            requested = asking(step, [rng.randrange(3)] * rng.randint(1, 20), rng.randint(1, 20), adapter, tenant)
            more = {"is_background": rng.random() < 0.2, "priority": rng.choice([0, 0, 3])}
            s.add(msgspec.structs.replace(requested, weight=10.0 ** (ord(tenant) % 3 - 1), **more), 0)
        if step >= 60 and not s.has_work():
            break
        plan = s.schedule()
        s.commit(plan, worker.execute(plan))
        if step % 20 == 0:
            s.check_integrity()
    assert not s.has_work(), "no end"


@pytest.mark.parametrize(
    ("mix", "most_loads"),
    [
        (AdapterMix(8, 4.7, seconds=4), 1.0),
        (AdapterMix(24, 5.3, num_adapters=2, seconds=4), 1.0),
        (AdapterMix(40, 8.7, seconds=8), 0.7),
    ],
)
def test_adapters_that_do_not_fit_together_cost_fair_scheduling_no_answers(mix: AdapterMix, most_loads: float) -> None:
    """`most_loads`: for each answer, over those of first come, first served. A load serves several sequences."""
    (found,) = fair_adapters((mix,))
    assert found.over_fifo >= 0.97
    assert found.num_loads <= found.num_loads_fifo
    assert found.num_loads / found.num_answers <= most_loads * found.num_loads_fifo / found.num_answers_fifo


def test_first_come_first_served_loads_serve_several_sequences() -> None:
    """So it is with one tenant, too: those whose adapter is there run while the next one's waits for room for KV."""
    (found,) = fair_adapters((AdapterMix(17, 4.7, places=8, seconds=6, num_output=2, adapter_pages=4),))
    assert found.num_loads_fifo < 0.6 * found.num_answers_fifo


def test_small_requests_do_not_keep_those_out_whose_adapters_have_no_room() -> None:
    (found,) = fair_adapters((AdapterMix(40, 3.3, depth=1, places=8, seconds=20, num_output=8),))
    assert found.shares < 4


def test_fair_scheduling_throws_no_long_prompts_away() -> None:
    found = long_prompts(num_output=16, seconds=10)
    assert found.over_fifo >= 0.95
    assert found.computed_over_needed <= 1.05
    assert shares_of_long_and_short(2, seconds=20) < 1.2


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32))
@example(seed=9)
@example(seed=24)
def test_what_a_tenant_is_charged_brings_answers(seed: int) -> None:
    """Adapters of up to the whole pool: no more than twice what each answer costs with a load of its own.

    The rest is what its sequences that wait and run have cost so far, and what it has paid for the losses of others.
    """
    rng = random.Random(seed)
    num_pages, num_tenants = rng.choice([24, 40, 64]), rng.choice([2, 3, 3, 4, 8])
    sizes = [rng.choice([0, 1, 2, 4, 8]) for _ in range(num_tenants - 1)] + [int(num_pages * rng.uniform(0.3, 0.95))]
    budget, depth = rng.choice([16, 32, 64, 512]), rng.choice([1, 2, 4, 8])
    work = list[Work]()
    for number, num_adapter_pages in enumerate(sizes):
        adapters = (f"adapter-{number}",) if num_adapter_pages else ()
        room = (num_pages - num_adapter_pages - 2) * virtual_gang.BLOCK_SIZE  # in tokens
        num_prompt = max(1, min(rng.choice([8, 20, 40, 100]), room // 2))
        num_output = max(1, min(rng.choice([4, 24, 64]), room // 2))
        weight = rng.choice([1.0, 1.0, 3.0, 0.2])
        work.append(Work(f"t{number}", num_prompt, num_output, adapters, depth, weight))
    of = GangLimits(1 << 17, 1 << 18, virtual_gang.BLOCK_SIZE, num_pages, budget, rng.choice([2, 4, 8, 16]))
    pages_of = {f"adapter-{number}": num_adapter_pages for number, num_adapter_pages in enumerate(sizes)}
    gang = VirtualGang(work, of, pages_of, overlaps=rng.random() < 0.5)
    gang.run(20)
    for one, num_adapter_pages in zip(work, sizes, strict=True):
        counter = gang.scheduler.counters._counters[(one.tenant, False)]
        answer = load_price(num_adapter_pages, virtual_gang.BLOCK_SIZE) + one.num_prompt + OUTPUT_TOKEN * one.num_output
        limit = 2 * answer * (gang.num_answers[one.tenant] + depth + 1) + 4 * budget
        assert counter.served * one.weight <= limit, one


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_only_ratios_of_weights_matter(seed: int) -> None:
    assert plans_with(seed, 1.0) == plans_with(seed, 0.1) == plans_with(seed, 7.0)


def plans_with(seed: int, factor: float) -> list[object]:
    """What each of 100 steps computes and loads, with all weights multiplied by `factor`."""
    rng = random.Random(seed)
    gang = Gang(limits(rng.randint(18, 40), rng.choice([2, 16]), rng.randint(2, 6)), random.Random(seed + 1))
    weights = {tenant: rng.choice([0.3, 1.0, 2.0, 10.0]) for tenant in "abcde"}
    plans: list[object] = []
    for _ in range(100):
        while rng.random() < 0.3:
            tenant, adapter = rng.choice("abcde"), rng.choice([None, None, "x3", "y5"])
            weight, is_background = weights[tenant] * factor, rng.random() < 0.2
            length = rng.randint(1, 24), rng.randint(1, 20)
            gang.add(tenant, *length, adapter, weight=weight, is_background=is_background)
        gang.step()
        plan = gang.executor.plan
        computed = [(part.sequence_id, part.start, len(part.token_ids)) for part in plan.sequences]
        plans.append((computed, [load.residence.digest for load in plan.loads]))
    return plans


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_charges_are_what_was_computed(seed: int) -> None:
    """And what tenants paid for the losses of others: these are free for their own tenants when they come again."""
    rng = random.Random(seed)
    gang = Gang(limits(rng.randint(18, 40), rng.randint(4, 16), rng.randint(2, 6)), rng)
    s, worth, num_charged, num_forgotten = gang.scheduler, 0.0, 0, 0
    paid: defaultdict[GrowingSequence, set[int]] = defaultdict(set)  # positions of losses that others have paid
    has_load_paid = dict[GrowingSequence, bool]()  # that have paid a load: another tenant has paid the next one

    def load_worth(sequence: GrowingSequence) -> int:
        return load_price(int((sequence.adapter_digest or "")[1:]), BLOCK_SIZE)

    def counted(method: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
        """The same method; `count` is called with its result, and with what it was called with."""

        def call(*given: Any) -> Any:
            result = method(*given)
            count(result, *given)
            return result

        return call

    def take_decodes(decodes: list[GrowingSequence]) -> None:
        nonlocal worth
        worth += OUTPUT_TOKEN * len(decodes)

    def take_chunks(chunks: list[PlannedChunk], *_: Any) -> None:
        nonlocal worth
        for chunk in chunks:
            part, positions = chunk.part, {*range(chunk.part.start, chunk.part.start + len(chunk.part.token_ids))}
            worth += len(positions - paid[chunk.sequence]) + OUTPUT_TOKEN * (part.sample is not None)
            worth += SCORED_TOKEN * (0 if part.scores is None else len(part.scores.targets) // INT32_BYTES)
            paid[chunk.sequence] = {each for each in paid[chunk.sequence] if each > max(positions)}

    def take_entered(_: None, sequence: GrowingSequence, *more: Any) -> None:
        nonlocal worth
        worth += CACHED_TOKEN * sequence.num_computed

    def take_loss(num_tokens: int, sequence: GrowingSequence) -> None:
        nonlocal worth
        lost = range(sequence.num_at_start, sequence.next_position)
        assert num_tokens == len(lost) + (0 if has_load_paid.get(sequence, True) else load_worth(sequence))
        worth += num_tokens
        if sequence in has_load_paid:
            has_load_paid[sequence] = True
        paid[sequence] = {*lost, *(each for each in paid[sequence] if each >= sequence.next_position)}

    def take_load(_: None, sequence: GrowingSequence) -> None:
        nonlocal worth, num_charged
        worth += 0 if has_load_paid.get(sequence, False) else load_worth(sequence)
        has_load_paid[sequence] = False
        num_charged += 1

    def forgotten(method: Callable[..., None]) -> Callable[..., None]:
        """The same method, after which some adapters that were loaded stay for no sequence."""

        def call(*given: Any) -> None:
            nonlocal num_forgotten
            before = len(s._waiting._loaded_for)
            method(*given)
            num_forgotten += before - len(s._waiting._loaded_for)

        return call

    with (
        patch.object(s._decodes, "plan", counted(s._decodes.plan, take_decodes)),
        patch.object(s._admission, "plan_prompts", counted(s._admission.plan_prompts, take_chunks)),
        patch.object(s._prefixes, "enter", counted(s._prefixes.enter, take_entered)),
        patch.object(s._admission, "charge_load", counted(s._admission.charge_load, take_load)),
        patch.object(GrowingSequence, "prepay", counted(GrowingSequence.prepay, take_loss)),
        patch.object(s.memory, "_adapter_went", forgotten(s.memory._adapter_went)),
        patch.object(s._waiting, "stop_keeping", forgotten(s._waiting.stop_keeping)),
    ):
        for _ in range(rng.randint(1, 60)):
            adapter, is_background = rng.choice([None, None, "a2", "b3"]), rng.random() < 0.2
            tenant, length = rng.choice("abcdef"), (rng.randint(1, 24), rng.randint(1, 20))
            sampling = rng.choice(
                [
                    SamplingParams(max_tokens=length[1]),
                    SamplingParams(max_tokens=rng.choice([0, length[1]]), num_prompt_logprobs=1),
                    SamplingParams(max_tokens=0, pooling=rng.choice(["mean", "last", "first"])),
                ]
            )
            weight = 1.0 + ord(tenant) % 3
            gang.add(tenant, *length, adapter, is_background=is_background, weight=weight, sampling=sampling)
            for _ in range(rng.randint(0, 3)):
                gang.step()
        while gang.engine.has_work():
            gang.step()
            assert gang.num_steps < 4000, "no end"
    charged = sum(counter.served * counter.given_weight for counter in s.counters._counters.values())
    assert charged == pytest.approx(worth)
    assert num_charged + num_forgotten == s.load().counters.num_adapter_loads
    least = sum(len(r.prompt_token_ids) * CACHED_TOKEN + gang.num_tokens[n] for n, r in gang.requests.items())
    assert charged >= least, "something was free"


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), priority=st.sampled_from([None, 0, 5]))
def test_a_sequence_does_not_wait_behind_background_work_for_the_document_that_they_share(
    seed: int, priority: int | None
) -> None:
    """It starts within the steps that its prompt takes, and as many as others are ahead, whatever computes first."""
    rng = random.Random(seed)
    budget = rng.randint(8, 16)
    gang, document = Gang(limits(200, budget, 8), rng), [1 + i % 90 for i in range(56)]

    def share(**more: object) -> int:
        number = len(gang.requests)
        requested = msgspec.structs.replace(asking(number, [*document, number % 90], 3, tenant="a"), **more)
        assert gang.scheduler.add(requested, 1) is None
        gang.requests[number] = requested
        return number

    def flood() -> None:
        for tenant in "bc" if priority is None else "aaa":
            while len(gang.live(tenant)) < 12:
                gang.add(tenant, rng.randint(20, 60), 3, priority=3 if tenant == "a" else 0)

    slow = share(is_background=priority is None, priority=-1)
    gang.step()
    flood()
    for _ in range(rng.randint(0, 5)):
        gang.step()
    assert not gang.num_tokens[slow]
    waits, came_at = share(priority=5 if priority is not None else 0), gang.num_steps
    while not gang.num_tokens[waits]:
        flood()
        gang.step()
        assert gang.num_steps - came_at < 60 * 12 * 3 // budget, "it waits without end"
    gang.scheduler.check_integrity()
