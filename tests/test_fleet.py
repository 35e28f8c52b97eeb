"""The choice of a leader as a pure function."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from motet.router.fleet import LeaderView, choose_leader

counts = st.integers(0, 200)
fleets = st.lists(
    st.builds(LeaderView, st.text("abcdef", min_size=1, max_size=4), counts, counts, counts),
    unique_by=lambda leader: leader.key,
    max_size=8,
)


def test_no_leader() -> None:
    assert choose_leader([]) is None


@given(fleets)
def test_takes_the_least_loaded_whatever_the_order(leaders: list[LeaderView]) -> None:
    chosen = choose_leader(leaders)
    assert chosen == choose_leader(leaders[::-1])
    if leaders:
        loads = {leader.key: leader.num_running + leader.num_waiting + leader.num_unseen for leader in leaders}
        assert chosen is not None
        assert loads[chosen] == min(loads.values())


@given(st.integers(1, 8), st.integers(0, 100))
def test_a_burst_between_two_frames_is_spread_evenly(num_leaders: int, num_sequences: int) -> None:
    unseen: Counter[str] = Counter({str(number): 0 for number in range(num_leaders)})
    for _ in range(num_sequences):
        chosen = choose_leader([LeaderView(key, 3, 1, count) for key, count in unseen.items()])
        assert chosen is not None
        unseen[chosen] += 1
    assert max(unseen.values()) - min(unseen.values()) <= 1
