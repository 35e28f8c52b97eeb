"""The choice of a gang: properties of the pure policy, and a fleet of gangs with thousands of adapters."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.benchmarks.rigs.power_law import draw_jobs
from motet.benchmarks.rigs.simulated_fleet import Choose, simulate
from motet.benchmarks.rigs.simulated_gang import Costs, Job
from motet.router.fleet.affinity import GangCosts, GangView, RoutingConfig, RoutingRequest, choose_gang

CONFIG = RoutingConfig()
seconds = st.floats(1e-6, 1e-1)
costs = st.builds(GangCosts, seconds, seconds, seconds, st.floats(0, 2))
fleets = st.lists(
    st.builds(
        GangView,
        st.text("abcdef", min_size=1, max_size=4),
        st.booleans(),
        st.integers(0, 100_000),
        st.integers(0, 500),
        costs,
        st.integers(0, 1000),
    ),
    unique_by=lambda gang: gang.key,
    min_size=1,
    max_size=10,
)
requests = st.builds(
    RoutingRequest, st.text("0123456789abcdef", min_size=1), st.integers(1001, 5000), st.integers(1, 200)
)
configs = st.builds(RoutingConfig, st.builds(GangCosts), st.integers(0, 1000), st.floats(0, 1))


def gang(
    key: str, has_adapter: bool = False, num_queued_tokens: int = 0, num_sequences: int = 0, num_cached_tokens: int = 0
) -> GangView:
    return GangView(key, has_adapter, num_queued_tokens, num_sequences, GangCosts(), num_cached_tokens)


REQUEST = RoutingRequest("digest", 100, num_adapter_pages=40)
COLD_LOAD_TOKENS = round(40 * GangCosts().s_per_page / GangCosts().s_per_queued_token)  # queued ones that cost as much


def test_none_only_without_gangs() -> None:
    assert choose_gang(REQUEST, [], CONFIG) is None
    assert choose_gang(REQUEST, [gang("a")], CONFIG) == "a"


@given(requests, fleets, configs, st.randoms())
def test_same_answer_in_any_order(
    request: RoutingRequest, gangs: list[GangView], config: RoutingConfig, rng: random.Random
) -> None:
    chosen = choose_gang(request, gangs, config)
    assert chosen in {view.key for view in gangs}
    rng.shuffle(gangs)
    assert choose_gang(request, gangs, config) == chosen


@given(requests, fleets, configs)
def test_affinity_never_costs_more_than_a_cold_load_would(
    request: RoutingRequest, gangs: list[GangView], config: RoutingConfig
) -> None:
    chosen = next(view for view in gangs if view.key == choose_gang(request, gangs, config))
    for other in gangs:
        elsewhere_s = other.net_s(config.num_shared_steps) + other.cold_load_s(request.num_adapter_pages)
        assert chosen.net_s(config.num_shared_steps) <= elsewhere_s + 1e-9 * abs(elsewhere_s)


@given(requests, fleets, configs)
def test_loads_only_where_every_holder_costs_more_than_a_load(
    request: RoutingRequest, gangs: list[GangView], config: RoutingConfig
) -> None:
    chosen = next(view for view in gangs if view.key == choose_gang(request, gangs, config))
    cheapest_load_s = min(
        (
            g.net_s(config.num_shared_steps) + g.cold_load_s(request.num_adapter_pages)
            for g in gangs
            if not g.has_adapter
        ),
        default=0.0,
    )
    if not chosen.has_adapter:
        assert all(g.net_s(config.num_shared_steps) > cheapest_load_s for g in gangs if g.has_adapter)


@given(st.integers(1001, 5000), st.integers(0, 2**32), fleets, configs)
def test_the_base_goes_where_the_crowd_is_least_but_for_one_like_it(
    num_tokens: int, salt: int, gangs: list[GangView], config: RoutingConfig
) -> None:
    key = choose_gang(RoutingRequest(None, num_tokens, 0, salt), gangs, config)
    chosen = next(g for g in gangs if g.key == key)
    least_s = min(g.net_s(config.num_shared_steps) for g in gangs)
    assert chosen.net_s(config.num_shared_steps) <= least_s + num_tokens * chosen.costs.s_per_queued_token


def test_requests_for_the_base_are_spread_over_gangs_that_are_equally_good() -> None:
    gangs = [gang(key) for key in "abcd"]
    chosen = Counter(choose_gang(RoutingRequest(None, 10, 0, salt), gangs, CONFIG) for salt in range(1000))
    assert min(chosen[key] for key in "abcd") > 200


def test_who_keeps_the_sequence_goes_on_with_it() -> None:
    """Even if that gang has the longest queue: the sequence has its place there already."""
    gangs = [gang("idle", has_adapter=True), replace(gang("keeper", num_queued_tokens=10**6), has_sequence=True)]
    for request in (REQUEST, RoutingRequest(None, 10, 0)):
        assert choose_gang(request, gangs, CONFIG) == "keeper"


def test_the_holder_until_its_queue_costs_a_cold_load() -> None:
    for num_tokens, expected in ((COLD_LOAD_TOKENS - 1, "holder"), (COLD_LOAD_TOKENS + 1, "other")):
        assert choose_gang(REQUEST, [gang("holder", True, num_tokens), gang("other")], CONFIG) == expected


def test_a_full_pool_makes_a_load_dearer() -> None:
    full = replace(gang("other"), costs=replace(GangCosts(), num_evictions_per_load=1.0))
    holder = gang("holder", True, round(1.5 * COLD_LOAD_TOKENS))
    assert choose_gang(REQUEST, [holder, full], CONFIG) == "holder"
    assert choose_gang(REQUEST, [holder, gang("other")], CONFIG) == "other"


def test_a_crowd_that_decodes_counts_though_nothing_is_queued() -> None:
    assert choose_gang(REQUEST, [gang("holder", True, 0, num_sequences=1000), gang("other")], CONFIG) == "other"


@pytest.mark.parametrize("digest", ["digest", None])
def test_where_the_beginning_is_kept_unless_the_queue_there_costs_more(digest: str | None) -> None:
    request = RoutingRequest(digest, 1000, num_adapter_pages=40)
    for num_queued, expected in ((0, {"keeper"}), (800, {"keeper"}), (2100, {"other"})):
        gangs = [gang("keeper", True, num_queued, num_cached_tokens=960), gang("other", True)]
        assert {choose_gang(replace(request, salt=salt), gangs, CONFIG) for salt in range(50)} == expected


def test_a_kept_beginning_is_no_reason_to_load_an_adapter_that_costs_more() -> None:
    keeper = gang("keeper", False, num_cached_tokens=COLD_LOAD_TOKENS // 2)  # another tenant's adapter was here
    request = replace(REQUEST, num_tokens=COLD_LOAD_TOKENS)
    assert choose_gang(request, [keeper, gang("holder", True)], CONFIG) == "holder"


@given(st.lists(st.text("0123456789abcdef", min_size=4), min_size=300, max_size=300, unique=True))
@settings(max_examples=5, deadline=None)
def test_new_adapters_are_spread_and_stay_when_a_gang_leaves(digests: list[str]) -> None:
    gangs = [gang(key) for key in "abcdef"]
    homes = {digest: choose_gang(replace(REQUEST, digest=digest), gangs, CONFIG) for digest in digests}
    assert max(Counter(homes.values()).values()) < 2.5 * len(digests) / len(gangs)
    for digest, home in homes.items():
        after = choose_gang(replace(REQUEST, digest=digest), gangs[:-1], CONFIG)
        assert after == home or home == "f"


def test_slightly_different_views_agree() -> None:
    """Routers learn of loads at different times, and must not each load a new adapter on a gang of its own."""
    rng = random.Random(1)
    agreed = 0
    for number in range(200):
        request = replace(REQUEST, digest=str(number))
        views = [[gang(key, False, rng.randrange(COLD_LOAD_TOKENS // 8)) for key in "abcdefgh"] for _ in range(4)]
        agreed += len({choose_gang(request, view, CONFIG) for view in views}) == 1
    assert agreed == 200


@pytest.mark.parametrize(("field", "value"), [("tolerance", 1.5), ("tolerance", -0.1), ("num_shared_steps", -1)])
def test_a_bad_setting_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RoutingConfig(**{field: value})  # type: ignore[arg-type]


NUM_GANGS, NUM_ROUTERS, NUM_ADAPTERS, NUM_JOBS = 12, 3, 3000, 16_000
RATE = NUM_GANGS * 27.0  # requests a second, near what the gangs can bear


def served(choose: Choose) -> list[Job]:
    """The later two thirds of the jobs, after all of them were served by routers with this policy."""
    jobs = draw_jobs(NUM_JOBS, RATE, NUM_ADAPTERS, exponent=1.0, num_routers=NUM_ROUTERS, seed=3)
    simulate(jobs, NUM_GANGS, [choose] * NUM_ROUTERS, Costs())
    assert all(job.ended_at > job.started_at >= job.arrives_at for job in jobs)
    return jobs[NUM_JOBS // 3 :]


def by_affinity(request: RoutingRequest, gangs: Sequence[GangView]) -> str:
    key = choose_gang(request, gangs, CONFIG)
    assert key is not None
    return key


def by_load(request: RoutingRequest, gangs: Sequence[GangView]) -> str:
    return min(gangs, key=lambda view: (view.crowd_s(CONFIG.num_shared_steps), view.key)).key


def queueing_p99_s(jobs: list[Job]) -> float:
    return sorted(job.started_at - job.arrives_at for job in jobs)[99 * len(jobs) // 100]


def num_gangs_by_adapter(jobs: list[Job]) -> dict[str, int]:
    gangs: defaultdict[str, set[str]] = defaultdict(set)
    for job in jobs:
        gangs[job.digest].add(job.gang)
    return {digest: len(keys) for digest, keys in gangs.items()}


def test_a_fleet_with_thousands_of_adapters() -> None:
    ours, blind = served(by_affinity), served(by_load)
    assert sum(job.began_load for job in ours) < sum(job.began_load for job in blind) / 2
    assert queueing_p99_s(ours) < 1.1 * queueing_p99_s(blind)
    assert max(job.ended_at for job in ours) < 1.1 * max(job.ended_at for job in blind)  # no gang is left behind

    num_requested = Counter(job.digest for job in ours)
    num_gangs, num_gangs_blind = num_gangs_by_adapter(ours), num_gangs_by_adapter(blind)
    assert num_gangs["adapter-0"] > 1, "the hottest adapter is more than one gang can serve"
    few = [digest for digest, count in num_requested.items() if 5 <= count <= 8]
    assert sum(num_gangs[digest] for digest in few) < 0.6 * sum(num_gangs_blind[digest] for digest in few)
