"""What stands before a tenant's sequence in a gang's fair order: against its definition, and what it promises."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.router.fleet.affinity import RoutingConfig, RoutingRequest
from motet.router.fleet.fair_queue import FairQueue
from motet.router.fleet.known_gang import KnownGang
from motet.tests.rigs.engine_loads import engine_load
from motet.workers.wire.engine_load import TenantShare
from motet.workers.wire.messages import Frame

counters = st.integers(0, 4000).map(float)
weights = st.sampled_from([0.5, 1.0, 2.0, 3.0])
tokens = st.integers(0, 5000)


def share(tenant: str, num_tokens: int, counter: float = 0.0, weight: float = 1.0, num_running: int = 0) -> TenantShare:
    return TenantShare(tenant, counter, num_running, 1, num_tokens, weight=weight)


@st.composite
def share_lists(draw: st.DrawFn, least: int = 0) -> list[TenantShare]:
    names = draw(st.lists(st.sampled_from("bcdefg"), unique=True, min_size=least))
    return [share(name, draw(tokens), draw(counters), draw(weights)) for name in names]


def queue_of(shares: list[TenantShare]) -> FairQueue:
    queue = FairQueue()
    queue.receive(shares)
    return queue


def whole(shares: list[TenantShare]) -> int:
    return sum(one.num_waiting_tokens for one in shares)


def by_definition(own: TenantShare, others: list[TenantShare]) -> float:
    level = own.counter + own.num_waiting_tokens / own.weight
    served = (min(one.num_waiting_tokens, one.weight * max(0.0, level - one.counter)) for one in others)
    return own.num_waiting_tokens + sum(served)


@given(share_lists(least=1), tokens, counters, weights)
def test_others_get_what_takes_them_to_the_tenants_level(
    others: list[TenantShare], num_own: int, counter: float, weight: float
) -> None:
    own = share("a", num_own, counter, weight)
    found = queue_of([*others, own]).num_tokens_before("a", whole([*others, own]))
    assert abs(found - by_definition(own, others)) <= 1


@given(tokens, counters, weights, st.integers(0, 10_000), st.integers(0, 500))
def test_a_tenant_that_is_alone_waits_for_all_that_is_queued(
    num_own: int, counter: float, weight: float, num_queued: int, num_unseen: int
) -> None:
    assert FairQueue().num_tokens_before("a", num_queued, weight, {"a": num_unseen}) == num_queued
    own = queue_of([share("a", num_own, counter, weight)])
    assert own.num_tokens_before("a", num_queued, unreported_tokens={"a": num_unseen}) == num_queued


@given(share_lists(least=1), weights, st.integers(0, 10**6))
def test_a_tenant_with_nothing_there_waits_for_none(
    others: list[TenantShare], weight: float, num_unreported: int
) -> None:
    """However long the queue is, and whatever of it the gang has not reported yet."""
    assert queue_of(others).num_tokens_before("a", whole(others) + num_unreported, weight) == 0


@given(share_lists(least=1), tokens, counters, weights, st.integers(0, 10**6))
def test_a_flood_counts_for_no_more_than_its_share(
    others: list[TenantShare], num_own: int, counter: float, weight: float, flood: int
) -> None:
    own = share("a", num_own, counter, weight)
    flooder, *rest = others
    flooded = msgspec.structs.replace(flooder, num_waiting_tokens=flooder.num_waiting_tokens + flood)
    calm, wild = [own, flooder, *rest], [own, flooded, *rest]
    before = queue_of(calm).num_tokens_before("a", whole(calm))
    after = queue_of(wild).num_tokens_before("a", whole(wild))
    share_of_it = flooder.weight * max(0.0, counter + num_own / weight - flooder.counter)
    assert before - 1 <= after <= num_own + sum(one.num_waiting_tokens for one in rest) + share_of_it + 1


@given(share_lists(least=1), tokens, counters, weights, st.sampled_from(["own", "others", "unseen", "weight", "less"]))
def test_it_grows_with_what_is_there_and_never_exceeds_it(
    others: list[TenantShare], num_own: int, counter: float, weight: float, grown: str
) -> None:
    own = share("a", num_own, counter, weight)
    shares = [own, *others]
    unseen = {"b": 50}
    before = queue_of(shares).num_tokens_before("a", whole(shares) + 50, unreported_tokens=unseen)
    assert 0 <= before <= whole(shares) + 50
    replace = msgspec.structs.replace
    if grown == "own":
        own = replace(own, num_waiting_tokens=num_own + 100)
    elif grown == "others":
        others = [replace(one, num_waiting_tokens=one.num_waiting_tokens + 100) for one in others]
    elif grown == "unseen":
        unseen = {"b": 150, "a": 20, "new": 70}
    elif grown == "weight":
        others = [replace(one, weight=2 * one.weight) for one in others]
    else:
        others = [replace(one, counter=one.counter / 2) for one in others]
    shares = [own, *others]
    after = queue_of(shares).num_tokens_before("a", whole(shares) + sum(unseen.values()), unreported_tokens=unseen)
    assert after >= before - 1


@given(share_lists(), share_lists())
def test_news_replace_what_was_reported(before: list[TenantShare], after: list[TenantShare]) -> None:
    reported = {one.tenant: one for one in (*before, *after)}
    queue = queue_of(before)
    queue.num_tokens_before("a", 1000)
    queue.receive(after)
    fresh = queue_of([*reported.values()])
    for tenant in "abcdefg":
        assert queue.num_tokens_before(tenant, 10**6) == fresh.num_tokens_before(tenant, 10**6)
        assert queue.share(tenant) == reported.get(tenant)


def test_who_comes_back_is_not_before_those_that_are_there() -> None:
    queue = queue_of([share("b", 1000, 500.0), TenantShare("a", 700.0, 0, 0, 0), TenantShare("c", 3.0, 0, 0, 0)])
    assert queue.num_tokens_before("a", 5000) == 200  # it had more than b has had
    assert queue.num_tokens_before("c", 5000) == 0
    assert queue.num_tokens_before("c", 5000, num_more=100) == 200  # 100 of each
    assert queue.num_tokens_before("c", 150, num_more=100) == 150


def test_tenants_that_rest_are_forgotten_in_time() -> None:
    queue = queue_of([TenantShare(str(number), 9.0, 0, 0, 0) for number in range(10_000)])
    assert queue.share("0") is None
    assert queue.share("9999") is not None


def test_a_router_counts_what_it_sent_by_tenant() -> None:
    known = KnownGang(RoutingConfig())
    flood = [share("flood", 9000, 100.0)]
    known.receive(Frame([], engine_load(num_waiting=9, num_queued_tokens=9000, num_steps=1), shares=flood))
    known.add_sequence(RoutingRequest(None, 500, 0, tenant="flood"))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == 0
    known.add_sequence(RoutingRequest(None, 70, 0, tenant="quiet"))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == 140
    assert known.view("key", None, tenant="flood").num_queued_tokens == 9570
    # A step reports all that is queued, but not yet by tenant.
    known.receive(Frame([], engine_load(num_waiting=10, num_queued_tokens=9570, num_steps=2)))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == 140
    quiet = [share("quiet", 70, 100.0), share("flood", 9500, 100.0)]
    known.receive(Frame([], engine_load(num_waiting=10, num_queued_tokens=9570, num_steps=3), shares=quiet))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == 140
    assert known.num_queued_tokens == 9570


@pytest.mark.parametrize("is_fair", [True, False])
def test_what_a_fair_gang_has_not_reported_stands_before_none(is_fair: bool) -> None:
    """A gang in order of arrival never reports tenants, and all that is queued there goes before any tenant's."""
    known = KnownGang(RoutingConfig(), is_fair=is_fair)
    known.receive(Frame([], engine_load(num_waiting=9, num_queued_tokens=9000, num_steps=1)))
    known.add_sequence(RoutingRequest(None, 500, 0, tenant="flood"))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == (0 if is_fair else 9500)
    known.add_sequence(RoutingRequest(None, 70, 0, tenant="quiet"))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == (140 if is_fair else 9570)


def test_background_work_stands_before_none_and_behind_all() -> None:
    known = KnownGang(RoutingConfig())
    now = engine_load(num_waiting=90, num_queued_tokens=9000, num_queued_background_tokens=8800, num_steps=1)
    known.receive(Frame([], now))  # a gang reports no tenants
    known.add_sequence(RoutingRequest(None, 500, 0, tenant="batch", is_background=True))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == 200
    assert known.view("key", None, tenant="batch", is_background=True).num_queued_tokens == 9500
    known.receive(Frame([], now, shares=[share("calm", 200, 100.0)]))
    assert known.view("key", None, tenant="quiet").num_queued_tokens == 0
