"""What holds for a fleet whose gangs share counters through routers, and what for one that does not: simulated."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.benchmarks.rigs.shared_counters import STEP_S, STEP_TOKENS, Backlog, simulate, worst_difference

NEWS_S = 0.25
RATE = STEP_TOKENS / STEP_S  # of a gang
SETTLED_S = 10.0


def bound(num_gangs: int) -> float:
    """What all gangs serve while news are under way: reported by a gang, and then by the routers."""
    return num_gangs * RATE * 2 * NEWS_S


@pytest.mark.parametrize("num_gangs", [1, 4, 16])
def test_two_tenants_get_the_same_though_one_is_at_half_of_the_gangs(num_gangs: int) -> None:
    wide, narrow = Backlog("wide", range(num_gangs)), Backlog("narrow", range(math.ceil(num_gangs / 2)))
    shared = simulate([wide, narrow], num_gangs, 60.0, NEWS_S)
    assert worst_difference(shared, wide, narrow) <= bound(num_gangs)
    assert worst_difference(shared, wide, narrow, SETTLED_S) <= bound(num_gangs) / 2
    if num_gangs > 1:
        alone = simulate([wide, narrow], num_gangs, 60.0, math.inf)
        assert worst_difference(alone, wide, narrow) > 10 * bound(num_gangs)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 6),
    st.floats(0, 10),
    st.floats(0, 10),
    st.sampled_from([1.0, 4.0]),
    st.integers(1, 3),
)
def test_whatever_a_third_does(num_gangs: int, from_s: float, lasts_s: float, weight: float, num_routers: int) -> None:
    """It comes and goes, at half of the gangs where the two are."""
    wide, narrow = Backlog("wide", range(num_gangs), weight), Backlog("narrow", range(num_gangs), weight)
    third = Backlog("third", range(num_gangs // 2), from_s=from_s, until_s=from_s + lasts_s)
    after = simulate([wide, narrow, third], num_gangs, 20.0, NEWS_S, num_routers)
    assert worst_difference(after, wide, narrow) <= bound(num_gangs)


def test_many_gangs_do_not_swing_together() -> None:
    """Each learns late what the others do, so all favour the same tenant for a while: within the bound."""
    wide, narrow = Backlog("wide", range(24)), Backlog("narrow", range(24))
    third = Backlog("third", range(12), from_s=5.0)
    after = simulate([wide, narrow, third], 24, 40.0, NEWS_S)
    assert worst_difference(after, wide, narrow) <= bound(24)
    assert after[-1]["third"] > 0.95 * 24 * RATE * 35.0 / 3


def test_several_routers_do_not_count_twice() -> None:
    wide, narrow = Backlog("wide", range(4)), Backlog("narrow", range(2))
    one = simulate([wide, narrow], 4, 30.0, NEWS_S, num_routers=1)
    assert simulate([wide, narrow], 4, 30.0, NEWS_S, num_routers=8) == one


def test_who_can_only_use_one_gang_gets_all_of_it() -> None:
    """The fleet's fair share is more than that gang, so the other tenant has the rest: max-min fair."""
    wide, narrow = Backlog("wide", range(4)), Backlog("narrow", [0])
    after = simulate([wide, narrow], 4, 60.0, NEWS_S)
    assert after[-1]["narrow"] > 0.97 * 60.0 * RATE


def test_what_was_had_elsewhere_before_is_not_held_against_a_tenant() -> None:
    """It was at this gang for a moment, then for long at others alone; now it is here only, beside another one."""
    local = Backlog("local", [0])
    moments = [Backlog("mover", [0], until_s=2.0), Backlog("mover", [1, 2, 3], until_s=30.0)]
    back = Backlog("mover", [0], from_s=30.0)
    after = simulate([local, *moments, back], 4, 60.0, NEWS_S)
    assert worst_difference(after, local, back, 31.0) <= bound(1)


def test_what_was_had_elsewhere_meanwhile_is_forgiven_once_it_ends() -> None:
    """A tenant that was far ahead by what it had at other gangs shares this one again soon after it lost them."""
    local = Backlog("local", [0])
    wide, back = Backlog("wide", [1, 2, 3], until_s=30.0), Backlog("wide", [0])
    after = simulate([local, wide, back], 4, 60.0, NEWS_S)
    assert worst_difference(after, local, back, 36.0) <= bound(1)
