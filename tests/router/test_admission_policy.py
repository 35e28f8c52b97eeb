"""Which requests are refused: properties of the pure policy, over random fleets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.router.fleet.admission import SLACK, AdmissionConfig, Admitted, TimeLimit, admit, expect
from motet.router.fleet.affinity import GangCosts, GangView, RoutingConfig, RoutingRequest, choose_gang
from motet.tests.rigs.part_configs import admission_config
from motet.workers.wire.messages import SequenceError

ROUTING = RoutingConfig()
NO_LIMIT = TimeLimit()
NO_OBJECTIVE = admission_config(max_queue_wait_s=0)

seconds = st.floats(0, 1e-1)
costs = st.builds(GangCosts, seconds, seconds, seconds, st.floats(0, 1), seconds, seconds)
counts = st.integers(0, 10_000)
gang_views = st.builds(
    GangView,
    st.sampled_from("abcd"),
    st.booleans(),
    counts,
    counts,
    costs,
    num_cached_tokens=st.integers(0, 500),
    num_waiting=st.integers(0, 3),
)
fleets = st.lists(gang_views, min_size=1, max_size=4, unique_by=lambda gang: gang.key)
requests = st.builds(RoutingRequest, st.none() | st.just("digest"), st.integers(1, 5000), st.integers(0, 50))
limits = st.builds(TimeLimit, st.none() | st.floats(0, 500), st.integers(1, 1000))
objectives = st.none() | st.floats(1e-3, 500)
configs = st.builds(
    admission_config,
    max_queue_wait_s=st.sampled_from([0.0, 1.0, 60.0]),
    max_gangs=st.integers(1, 6),
    queued_tokens_per_gang=st.integers(0, 10_000),
)

CROWDED = GangView("a", True, 1000, 20, GangCosts(s_per_waiting_token=0.1), num_waiting=5)  # 100 s of queue
SHORT = RoutingRequest(None, 10, 0)


def is_hopeless(request: RoutingRequest, limit: TimeLimit, gang: GangView) -> bool:
    """Its timeout is too short for its answer, whether or not others wait there."""
    return limit.timeout_s is not None and expect(request, gang, limit.num_new_tokens).alone_s > limit.timeout_s


def is_late(request: RoutingRequest, limit: TimeLimit, gang: GangView, config: AdmissionConfig) -> bool:
    found = expect(request, gang, limit.num_new_tokens)
    misses_timeout = limit.timeout_s is not None and found.answer_s > limit.timeout_s
    return misses_timeout or bool(config.max_queue_wait_s and found.queue_s > config.max_queue_wait_s)


def misses_objective(request: RoutingRequest, gang: GangView, objective_s: float | None) -> bool:
    """Whether the first token would come after the objective, and sooner if the gang's queue were empty."""
    if objective_s is None or not gang.num_waiting:
        return False
    first_s = expect(request, gang, 1).answer_s
    return first_s > objective_s and first_s > expect(request, replace(gang, num_waiting=0), 1).answer_s


@settings(deadline=None)
@given(requests, limits, fleets, configs, objectives)
def test_refused_is_only_who_would_be_late_everywhere(
    request: RoutingRequest,
    limit: TimeLimit,
    gangs: list[GangView],
    config: AdmissionConfig,
    objective_s: float | None,
) -> None:
    verdict = admit(request, limit, gangs, ROUTING, config, objective_s)
    if isinstance(verdict, SequenceError):
        assert verdict.kind == "overloaded"
        assert all(is_late(request, limit, g, config) or misses_objective(request, g, objective_s) for g in gangs)
        assert verdict.reason in {"timeout", "objective", "wait"} - ({"objective"} if objective_s is None else set())
        worth_a_wait = [gang for gang in gangs if not is_hopeless(request, limit, gang)]
        assert verdict.retry_after_s == min((expect(request, gang, 1).queue_s for gang in worth_a_wait), default=None)
    else:
        gang = next(gang for gang in gangs if gang.key == verdict.gang_key)
        fixed = len(gangs) >= config.max_gangs
        assert not (fixed and is_late(request, limit, gang, config))
        assert not (fixed and misses_objective(request, gang, objective_s))
        assert (verdict.wait_s is None) == (config.max_queue_wait_s == 0)
        if verdict.wait_s is not None:
            assert verdict.wait_s >= SLACK * expect(request, gang, 1).queue_s


@settings(deadline=None)
@given(requests, fleets)
def test_without_limits_it_is_routing_alone(request: RoutingRequest, gangs: list[GangView]) -> None:
    assert admit(request, NO_LIMIT, gangs, ROUTING, NO_OBJECTIVE) == Admitted(
        str(choose_gang(request, gangs, ROUTING)), None
    )


@settings(deadline=None)
@given(requests, limits, fleets, configs, objectives)
def test_who_is_admitted_would_be_with_more_time(
    request: RoutingRequest,
    limit: TimeLimit,
    gangs: list[GangView],
    config: AdmissionConfig,
    objective_s: float | None,
) -> None:
    more = limit if limit.timeout_s is None else replace(limit, timeout_s=2 * limit.timeout_s + 1)
    longer = replace(config, max_queue_wait_s=2 * config.max_queue_wait_s)
    if isinstance(admit(request, limit, gangs, ROUTING, config, objective_s), Admitted):
        assert isinstance(admit(request, more, gangs, ROUTING, longer, objective_s), Admitted)
        assert isinstance(admit(request, limit, gangs, ROUTING, config), Admitted)
        if objective_s is not None:
            assert isinstance(admit(request, limit, gangs, ROUTING, config, 2 * objective_s), Admitted)


@settings(deadline=None)
@given(requests, fleets, configs)
def test_a_gang_that_holds_the_sequence_takes_it(
    request: RoutingRequest, gangs: list[GangView], config: AdmissionConfig
) -> None:
    gangs = [replace(gang, has_sequence=gang.key == gangs[0].key) for gang in gangs]
    assert admit(request, TimeLimit(0.0), gangs, ROUTING, config, 1e-9) == Admitted(gangs[0].key, None)


@settings(deadline=None)
@given(requests, fleets, configs)
def test_the_expected_wait_is_none_where_none_is_known_to_wait(
    request: RoutingRequest, gangs: list[GangView], config: AdmissionConfig
) -> None:
    gangs = [replace(gang, num_waiting=0) for gang in gangs]
    assert isinstance(admit(request, NO_LIMIT, gangs, ROUTING, config, 1e-9), Admitted)


def test_what_is_reported_of_a_refusal() -> None:
    waits = admit(SHORT, NO_LIMIT, [CROWDED], ROUTING, admission_config())
    assert waits == SequenceError(
        "overloaded",
        "the request is expected to wait 100.0 s for its turn, and at most 60 s are accepted",
        100.0,
        "wait",
    )
    misses = admit(SHORT, TimeLimit(5.0), [CROWDED], ROUTING, NO_OBJECTIVE)
    assert misses == SequenceError(
        "overloaded",
        "the answer needs up to 125.0 s, as 100.0 s are expected in the queue, and 5.0 s of its timeout are left",
        100.0,
        "timeout",
    )
    late = admit(SHORT, NO_LIMIT, [CROWDED], ROUTING, admission_config(), 2.5)
    assert late == SequenceError(
        "overloaded",
        "the first token needs up to 125.0 s, as 100.0 s are expected in the queue, and the tenant's latency "
        "objective is 2.5 s",
        100.0,
        "objective",
    )
    assert admit(SHORT, TimeLimit(5.0), [CROWDED], ROUTING, NO_OBJECTIVE, 2.5) == misses


def test_an_objective_is_about_the_first_token_and_what_the_queue_does_to_it() -> None:
    brief = replace(CROWDED, num_queued_tokens=10, costs=GangCosts(s_per_waiting_token=0.1, s_per_step=2.0))
    long_answer = TimeLimit(num_new_tokens=1000)
    assert isinstance(admit(SHORT, long_answer, [brief], ROUTING, NO_OBJECTIVE, 3.5), Admitted)  # 1.25 + 2 s
    assert isinstance(admit(SHORT, long_answer, [brief], ROUTING, NO_OBJECTIVE, 3.0), SequenceError)
    long_prompt = replace(SHORT, num_tokens=1000)
    slow = replace(brief, costs=GangCosts(s_per_token=0.01, s_per_waiting_token=0.1))  # 10 s of its own
    assert isinstance(admit(long_prompt, NO_LIMIT, [slow], ROUTING, NO_OBJECTIVE, 3.0), SequenceError)
    alone = replace(slow, num_waiting=0)
    assert admit(long_prompt, NO_LIMIT, [alone], ROUTING, NO_OBJECTIVE, 3.0) == Admitted("a", None)
    # An adapter that comes while the queue passes is made no later by it, and once it is there the queue decides.
    adapted = RoutingRequest("digest", 10, 100)
    coming = GangView("a", False, 10, 1, GangCosts(s_per_page=0.1, s_per_waiting_token=0.1), num_waiting=1)
    assert admit(adapted, NO_LIMIT, [coming], ROUTING, NO_OBJECTIVE, 1.0) == Admitted("a", None)
    assert isinstance(
        admit(adapted, NO_LIMIT, [replace(coming, has_adapter=True)], ROUTING, NO_OBJECTIVE, 1.0), SequenceError
    )


def test_what_an_objective_lets_in_waits_as_long_as_without_one() -> None:
    for config in (NO_OBJECTIVE, admission_config(max_queue_wait_s=200.0)):
        assert admit(SHORT, NO_LIMIT, [CROWDED], ROUTING, config, 150.0) == admit(
            SHORT, NO_LIMIT, [CROWDED], ROUTING, config
        )


def test_a_gang_that_would_be_late_is_left_for_one_that_would_not() -> None:
    adapted = RoutingRequest("digest", 10, 100)
    cold = GangView("b", False, 0, 0, GangCosts(s_per_page=2.0))  # 200 s to load it: the crowd is preferred
    assert admit(adapted, NO_LIMIT, [CROWDED, cold], ROUTING, NO_OBJECTIVE) == Admitted("a", None)
    assert admit(adapted, NO_LIMIT, [CROWDED, cold], ROUTING, admission_config()) == Admitted("b", 120.0)


def test_cached_tokens_a_resident_adapter_and_few_tokens_are_sooner() -> None:
    costs = GangCosts(s_per_token=0.01, s_per_page=0.1, s_per_step=0.5)
    gang = GangView("a", False, 0, 0, costs)
    request = RoutingRequest("digest", 1000, 30)
    assert expect(request, gang, 1).answer_s == pytest.approx(3 + 10 + 0.5)
    assert expect(request, replace(gang, num_cached_tokens=600), 1).answer_s == pytest.approx(3 + 4 + 0.5)
    assert expect(request, replace(gang, has_adapter=True), 1).answer_s == pytest.approx(10 + 0.5)
    assert expect(request, gang, 11).answer_s == pytest.approx(3 + 10 + 0.5 + 5)


def test_no_queue_is_refused_that_the_autoscaler_has_to_see() -> None:
    may_grow = admission_config(max_gangs=2, queued_tokens_per_gang=600)
    admitted = admit(SHORT, NO_LIMIT, [CROWDED], ROUTING, may_grow)
    assert admitted == Admitted("a", SLACK * 100.0)
    assert isinstance(admit(SHORT, NO_LIMIT, [CROWDED], ROUTING, replace(may_grow, max_gangs=1)), SequenceError)
    longer = replace(CROWDED, num_queued_tokens=1201)
    assert isinstance(admit(SHORT, NO_LIMIT, [longer], ROUTING, may_grow), SequenceError)
    assert admit(SHORT, NO_LIMIT, [CROWDED], ROUTING, may_grow, 1.0) == admitted
    refused = admit(SHORT, NO_LIMIT, [longer], ROUTING, may_grow, 1.0)
    assert isinstance(refused, SequenceError)
    assert refused.reason == "objective"


def test_a_refusal_says_small_times_too() -> None:
    """No expected wait is shown as 0.0 s."""
    gang = replace(CROWDED, num_waiting=1, num_queued_tokens=1, costs=replace(CROWDED.costs, s_per_waiting_token=0.004))
    refused = admit(SHORT, TimeLimit(0.003), [gang], ROUTING, admission_config())
    assert isinstance(refused, SequenceError)
    assert "0.0 s" not in refused.message and "3 ms of its timeout are left" in refused.message


def test_a_timeout_that_no_wait_mends_has_no_time_to_come_back() -> None:
    alone_s = expect(SHORT, CROWDED, 1).alone_s
    refused = admit(SHORT, TimeLimit(alone_s / 2), [CROWDED], ROUTING, admission_config())
    assert isinstance(refused, SequenceError)
    assert (refused.reason, refused.retry_after_s) == ("timeout", None)
    late = admit(SHORT, TimeLimit(2 * alone_s), [CROWDED], ROUTING, admission_config())
    assert isinstance(late, SequenceError) and late.retry_after_s is not None
