"""Where sequences wait as no gang is there: one tenant's never keep another's out, and no tenant learns of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.router.fleet import dispatch
from motet.router.fleet.admission import TimeLimit
from motet.router.fleet.dispatch import FleetDispatcher
from motet.router.fleet.fair_queue import QueueUse, is_in_share, tenant_to_preempt
from motet.router.fleet.open_sequence import OpenSequence
from motet.tests.rigs.part_configs import admission_config
from motet.tests.rigs.patience import PATIENCE_S
from motet.tests.rigs.stand_in_engine import adapter_pages
from motet.workers.wire.messages import SamplingParams, SequenceError, SequenceRequest

NUM_PLACES = 8
TENANTS = "abcdefgh"
COMINGS = st.lists(st.sampled_from("aaaaabbbcdefgh"), max_size=80)
WEIGHTS = st.lists(st.sampled_from([0.5, 1.0, 1.0, 3.0]), min_size=len(TENANTS), max_size=len(TENANTS))


@given(COMINGS, WEIGHTS, st.lists(st.booleans(), min_size=80, max_size=80))
def test_who_has_less_than_its_share_gets_a_place(comings: str, weights: list[float], promises: list[bool]) -> None:
    weight_of = dict(zip(TENANTS, weights, strict=True))
    uses: dict[str, QueueUse] = {}
    for tenant, is_promised in zip(comings, promises, strict=False):
        weight, total = weight_of[tenant], sum(uses[one].num for one in uses)
        own = uses.get(tenant, QueueUse(weight=weight))
        rest = sum(places.weight for one, places in uses.items() if one != tenant)
        if total >= NUM_PLACES:
            loser = tenant_to_preempt(tenant, weight, uses)
            if loser is not None:
                assert uses[loser].num / uses[loser].weight > (own.num + 1) / weight
                uses[loser].num -= 1
                assert uses[loser].num >= uses[loser].num_committed
                if not uses[loser].num:
                    del uses[loser]
            elif not is_in_share(tenant, weight, uses, NUM_PLACES):
                assert own.num + 1 > NUM_PLACES * weight / (weight + rest)
                continue
        uses[tenant] = QueueUse(own.num + 1, own.num_committed + is_promised, weight)
    # What is not committed is bounded, whatever else is there.
    assert sum(use.num - use.num_committed for use in uses.values()) <= 2 * NUM_PLACES


@pytest.fixture
async def dispatcher(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FleetDispatcher]:
    monkeypatch.setattr(dispatch, "MAX_AWAITING_GANG", NUM_PLACES)
    dispatcher = FleetDispatcher(
        "a secret", gang_wait_s=PATIENCE_S, adapter_pages=adapter_pages, admission=admission_config()
    )
    yield dispatcher
    await dispatcher.close()


def submit(dispatcher: FleetDispatcher, tenant: str, *, has_begun: bool = False) -> OpenSequence:
    request = SequenceRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=3), tenant=tenant)
    return dispatcher.submit(request, limit=TimeLimit(has_begun=True) if has_begun else None)


async def refusal(sequence: OpenSequence) -> SequenceError:
    async with asyncio.timeout(PATIENCE_S):
        (update,) = [update async for update in sequence]
    assert update.error is not None
    return update.error


async def test_a_flood_that_waits_for_a_gang_gives_way_to_a_quiet_tenant(dispatcher: FleetDispatcher) -> None:
    flood = [submit(dispatcher, "flood") for _ in range(NUM_PLACES)]
    refused = await refusal(submit(dispatcher, "flood"))
    assert (refused.kind, refused.reason) == ("overloaded", "no_gang")
    assert not any(letter.isdigit() for letter in refused.message)
    quiet = [submit(dispatcher, "quiet") for _ in range(NUM_PLACES // 2)]
    assert not any(sequence.closed for sequence in quiet)
    assert [sequence.closed for sequence in flood] == [False] * 4 + [True] * 4, "the newest gave way"
    assert (await refusal(flood[-1])).reason == "tenant_full"
    assert submit(dispatcher, "quiet").closed, "with as many as the flood it has its share"
    assert dispatcher.num_waiting == NUM_PLACES


async def test_what_has_begun_is_not_given_up_and_keeps_no_other_out(dispatcher: FleetDispatcher) -> None:
    begun = [submit(dispatcher, "flood", has_begun=True) for _ in range(2 * NUM_PLACES)]
    quiet = [submit(dispatcher, "quiet") for _ in range(NUM_PLACES // 2)]
    assert not any(sequence.closed for sequence in (*begun, *quiet))
    assert submit(dispatcher, "quiet").closed
    for sequence in (*begun, *quiet):
        sequence.cancel()
    assert dispatcher.num_waiting == 0


async def test_a_tenant_that_is_refused_sees_nothing_of_others(
    dispatcher: FleetDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "MAX_AWAITING", 4)
    for tenant in ("one", "two", "three", "four"):
        request = SequenceRequest(prompt_token_ids=[1], sampling=SamplingParams(), tenant=tenant, key=tenant)
        dispatcher.submit(request, is_resumed=True)
    for _ in range(2):
        request = SequenceRequest(prompt_token_ids=[1], sampling=SamplingParams(), tenant="one", key="again")
        refused = dispatcher.submit(request, is_resumed=True)
    error = await refusal(refused)
    assert error.reason == "full"
    assert "4" not in error.message
