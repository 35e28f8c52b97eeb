"""How many sequences may wait in one gang, and for how long."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.tests.rigs.part_configs import leader_config
from motet.workers.fairness.tenant_counters import MaxQueue
from motet.workers.leader import queue_limit
from motet.workers.leader.queue_limit import QueueLimit
from motet.workers.leader.routed_sequences import SequenceTimers
from motet.workers.wire.messages import SamplingParams, SequenceError, SequenceRequest, SequenceUpdate

tenants = st.sampled_from(["acme", "globex"])
actions = st.one_of(
    st.tuples(st.just("enter"), st.integers(1, 40), tenants),
    st.tuples(st.just("leave"), st.integers(0, 60), tenants),
    st.tuples(st.just("force"), st.integers(1, 40), tenants),  # one that had begun elsewhere
)


@settings(deadline=None)
@given(st.lists(actions, max_size=60), st.integers(1, 8), st.integers(1, 100), st.sampled_from([0.25, 0.5, 1.0]))
def test_never_more_than_the_bounds_say(
    todo: list[tuple[str, int, str]], max_sequences: int, max_tokens: int, share: float
) -> None:
    room = QueueLimit(
        leader_config(max_waiting_sequences=max_sequences, max_waiting_tokens=max_tokens, tenant_queue_share=share)
    )
    model: dict[int, tuple[int, int, str]] = {}  # when it came, its tokens, its tenant
    for now, (action, value, tenant) in enumerate(todo):
        if action == "leave":
            room.leave(value)
            model.pop(value, None)
        else:
            refusal = room.refusal(tenant, value, now)
            num_tokens = sum(tokens for _, tokens, _ in model.values())
            own = [tokens for _, tokens, held_by in model.values() if held_by == tenant]
            is_full = len(model) >= max_sequences or bool(model and num_tokens + value > max_tokens)
            has_its_share = len(own) >= max(1, int(share * max_sequences))
            has_its_share |= bool(own and sum(own) + value > int(share * max_tokens))
            assert (refusal is not None) == (is_full or has_its_share)
            if refusal is not None:
                assert (refusal.kind, refusal.reason) == ("overloaded", "full" if is_full else "tenant_full")
                waited_s = [now - came for came, _, held_by in model.values() if held_by == tenant]
                assert refusal.retry_after_s == max(waited_s, default=0), "nothing of how long others have waited"
            if action == "force" or refusal is None:
                room.enter(now, tenant, value, now)
                model[now] = now, value, tenant
        room.check_integrity()
        assert (len(room), room.num_tokens) == (len(model), sum(tokens for _, tokens, _ in model.values()))
        assert room.oldest_s(now) == now - min((came for came, _, _ in model.values()), default=now)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30)), max_size=60), st.integers(1, 8))
def test_the_longest_queue_gives_way_and_no_longer_one_comes_of_it(todo: list[tuple[str, int]], most: int) -> None:
    """Against what it is for: bounds hold, and a tenant with less than another is never refused for the whole."""
    room = QueueLimit(leader_config(max_waiting_sequences=most, max_waiting_tokens=100, tenant_queue_share=1.0))
    model: dict[int, tuple[str, int]] = {}

    def filled(tenant: str, more: int = 0) -> float:
        own = [tokens for held_by, tokens in model.values() if held_by == tenant]
        return max((len(own) + bool(more)) / most, (sum(own) + more) / 100)

    for number, (tenant, num_tokens) in enumerate(todo):
        wanted = filled(tenant, num_tokens)
        if room.refusal(tenant, num_tokens, number) is not None:
            given_up = room.make_room(tenant, num_tokens, 1.0)
            for gone in given_up:
                held_by, _ = model[gone]
                assert held_by != tenant and filled(held_by) > wanted
                assert gone == max(each for each, (other, _) in model.items() if other == held_by)
                del model[gone]
            if not given_up:
                continue
        room.enter(number, tenant, num_tokens, number)
        model[number] = tenant, num_tokens
        room.check_integrity()
        assert (len(room), room.num_tokens) == (len(model), sum(tokens for _, tokens in model.values()))
        assert len(model) <= most and (len(model) == 1 or room.num_tokens <= 100)


def test_a_tenant_with_nothing_waiting_finds_room_in_a_queue_full_of_others_by_weight() -> None:
    room = QueueLimit(leader_config(max_waiting_sequences=8, tenant_queue_share=0.5))
    for number in range(8):
        room.enter(number, "ab"[number % 2], 10, number, weight=(1.0, 4.0)[number % 2], may_go=number < 6)
    assert room.refusal("quiet", 10, 9) is not None
    assert room.make_room("quiet", 10, 1.0) == [4]  # the newest of a: b has as much, but may have four times that
    room.enter(9, "quiet", 10, 9)
    assert room.make_room("c", 10, 1.0) == [2]
    assert room.make_room("a", 10, 1.0) == []
    assert len(room) == 7


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(1, 40)), max_size=12))
def test_who_has_less_is_refused_behind_no_tiny_sequences_and_the_queue_is_over_by_few(
    todo: list[tuple[str, int, int]],
) -> None:
    """With three given up at once, against a drop of all that is above what the refused one would have."""
    most, most_tokens, at_once = 100, 400, 3
    room = QueueLimit(leader_config(max_waiting_sequences=most, max_waiting_tokens=most_tokens, tenant_queue_share=1.0))
    model: dict[int, tuple[str, int]] = {}
    num_over, number = 0, 0  # over: that came since the queue was within its bounds

    def filled(tenant: str, of: dict[int, tuple[str, int]]) -> float:
        own = [tokens for held_by, tokens in of.values() if held_by == tenant]
        return max(len(own) / most, sum(own) / most_tokens)

    for tenant, num_tokens in [(tenant, num_tokens) for tenant, num_tokens, times in todo for _ in range(times)]:
        number += 1
        if room.refusal(tenant, num_tokens, number) is not None:
            given_up: list[int] = []
            with patch.object(queue_limit, "_MAX_GIVEN_UP", at_once):
                given_up = room.make_room(tenant, num_tokens, 1.0)
            assert len(given_up) <= at_once
            if not given_up:
                wanted = filled(tenant, model | {number: (tenant, num_tokens)})
                left = dict(model)
                for each in sorted(model, reverse=True):
                    if model[each][0] != tenant and filled(model[each][0], left) > wanted:
                        del left[each]
                left_tokens = sum(tokens for _, tokens in left.values())
                assert len(left) >= most or (left and left_tokens + num_tokens > most_tokens)
                continue
            for gone in given_up:
                del model[gone]
        room.enter(number, tenant, num_tokens, number)
        model[number] = tenant, num_tokens
        room.check_integrity()
        num_over = num_over + 1 if room.num_tokens > most_tokens and len(model) > 1 else 0
        assert len(model) <= most and num_over <= most // (at_once - 1)


def test_a_longer_prompt_is_not_refused_behind_many_tiny_sequences() -> None:
    room = QueueLimit(leader_config(max_waiting_sequences=4096, max_waiting_tokens=100_000, tenant_queue_share=0.5))
    for number in range(202):
        room.enter(number, "ab"[number % 2], 49_900 if number < 2 else 1, 0.0)
    assert room.refusal("quiet", 200, 1.0) is not None
    assert 0 < len(room.make_room("quiet", 200, 1.0)) <= 64


class _Counting(QueueLimit):
    num_looks = 0

    def filled(self, num_sequences: int, num_tokens: int, weight: float) -> float:
        self.num_looks += 1
        return super().filled(num_sequences, num_tokens, weight)


def test_an_arrival_at_a_full_queue_looks_at_few_of_the_tenants_that_wait() -> None:
    room = _Counting(leader_config(max_waiting_sequences=1001, tenant_queue_share=0.5))
    for number in range(1000):
        room.enter(number, f"tenant-{number}", 10, 0.0)
    room.enter(1000, "tenant-0", 10, 0.0)
    room.num_looks = 0
    for _ in range(10):
        assert room.make_room("tenant-1", 10, 1.0) == []
        assert room.make_room("tenant-0", 10, 1.0) == []
    assert room.num_looks <= 100
    assert room.make_room("quiet", 10, 1.0) == [1000]
    assert room.make_room("quiet", 10, 1.0) == []  # there is room
    assert room.num_looks <= 120


rises_and_falls = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=400)


@given(rises_and_falls)
def test_the_largest_is_found_after_any_changes(todo: list[tuple[str, int]]) -> None:
    has: dict[str, float] = {}
    fullest = MaxQueue(lambda tenant: has.get(tenant, 0.0))
    for number, (tenant, more) in enumerate(todo):
        before = has.get(tenant, 0.0)
        has[tenant] = float(more)
        if more >= before:
            fullest.increased(tenant)
        if not more:
            fullest.remove(tenant)
        if number % 3 == 0:
            assert fullest.largest() == max(has.values())
        if number % 5 == 0 and fullest.largest():
            popped = fullest.pop()
            assert has[popped] == max(has.values())
            fullest.increased(popped)
        assert len(fullest) <= 2 * len(has) + 65


def test_what_the_fullest_is_found_by_does_not_grow_with_all_who_ever_came() -> None:
    room = QueueLimit(leader_config())
    room.enter(0, "stays", 1000, 0.0)
    for number in range(1, 2000):
        room.enter(number, f"tenant-{number}", 10, 0.0)
        room.leave(number)
    assert len(room._fullest) < 100


def request(wait_s: float | None, timeout_s: float | None) -> SequenceRequest:
    return SequenceRequest(
        sequence_id=1,
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(),
        tenant="acme",
        wait_s=wait_s,
        timeout_s=timeout_s,
    )


async def test_timers_ring_only_for_who_still_waits_or_runs() -> None:
    room = QueueLimit(leader_config())
    waited: list[int] = []
    timed_out: list[int] = []
    timers = SequenceTimers(room, waited.append, timed_out.append)
    timers.start(1, request(0.0, None))
    timers.start(2, request(0.0, 0.0))
    timers.start(3, request(0.0, 0.0))
    timers.start(4, request(0.0, 0.0))
    timers.start(5, request(0.0, 0.0))
    timers.start(6, request(None, None))
    assert (len(room), len(timers)) == (6, 5)
    timers.follow(SequenceUpdate(2))
    timers.follow(SequenceUpdate(3, [7]))
    timers.follow(SequenceUpdate(4, [7], finish_reason="length"))
    timers.follow(SequenceUpdate(5, error=SequenceError("internal", "bad")))
    await asyncio.sleep(0.05)
    assert (waited, timed_out) == ([1, 2], [2, 3])
    assert len(room) == 3
    for engine_id in (1, 2, 3, 6, 99):
        timers.end(engine_id)
    assert (len(room), len(timers)) == (0, 0)


def test_a_tenant_who_fills_the_queue_keeps_no_other_out() -> None:
    room = QueueLimit(leader_config(max_waiting_sequences=8, tenant_queue_share=0.5))
    for engine_id in range(4):
        assert room.refusal("acme", 10, 0.0) is None
        room.enter(engine_id, "acme", 10, 0.0)
    refusal = room.refusal("acme", 10, 1.0)
    assert refusal is not None
    assert refusal.reason == "tenant_full"
    assert room.refusal("globex", 10, 1.0) is None
    room.leave(0)
    assert room.refusal("acme", 10, 1.0) is None


def test_a_refusal_names_the_bound_that_was_met() -> None:
    room = QueueLimit(leader_config(max_waiting_sequences=8, max_waiting_tokens=200, tenant_queue_share=0.5))
    room.enter(1, "acme", 90, 0.0)
    for times, more in ((1, 20), (2, 120)):
        refusal = room.refusal("acme", more, 0.0, times)
        assert refusal is not None
        assert refusal.message.endswith(f"{more} more would be over {times * 100}; try again later")


def test_bounds_that_change_are_about_who_comes_next() -> None:
    room = QueueLimit(leader_config(max_waiting_sequences=8, tenant_queue_share=1.0))
    for engine_id in range(4):
        room.enter(engine_id, "acme", 10, 0.0)
    room.change(leader_config(max_waiting_sequences=3, tenant_queue_share=1.0))
    refusal = room.refusal("globex", 10, 0.0)
    assert refusal is not None
    assert refusal.reason == "full"
    room.change(leader_config(max_waiting_sequences=8, tenant_queue_share=0.5))
    refusal = room.refusal("acme", 10, 0.0)
    assert refusal is not None
    assert refusal.reason == "tenant_full"
    assert room.refusal("globex", 10, 0.0) is None
    room.check_integrity()


@pytest.mark.parametrize("most", [{"max_waiting_sequences": 7}, {"max_waiting_tokens": 7}])
def test_a_full_queue_says_nothing_of_others(most: dict[str, int]) -> None:
    limit = QueueLimit(leader_config(**most))
    for number in range(7):
        limit.enter(number, f"tenant-{number}", 1, 0.0)
    refused = limit.refusal("quiet", 2, 1.0)
    assert refused is not None
    assert refused.reason == "full"
    assert "7" not in refused.message
