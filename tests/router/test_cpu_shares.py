"""A tenant takes no more than its share of a processor, and a burst."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motet.router.grammars.grammar_check import CpuShares

SHARE, BURST_S = 0.25, 2.0
PIECES = st.tuples(st.sampled_from("ab"), st.floats(0.001, 3.0), st.floats(0.0, 20.0))


@given(st.lists(PIECES, max_size=40))
def test_a_client_that_obeys_retry_after_takes_its_share_and_a_burst_and_others_do_not_see_it(
    pieces: list[tuple[str, float, float]],
) -> None:
    now = 0.0
    shares = CpuShares(SHARE, BURST_S, lambda: now)
    free_at, taken = dict.fromkeys("ab", 0.0), dict.fromkeys("ab", 0.0)
    for tenant, cpu_s, pause_s in pieces:
        now = max(now, free_at[tenant]) + pause_s
        assert taken[tenant] <= SHARE * now + BURST_S + 1e-6
        taken[tenant] += cpu_s
        rest_s = shares.rest_s(tenant, cpu_s)
        free_at[tenant] = now + rest_s
        assert rest_s == 0 or taken[tenant] > BURST_S
    now += 1e6
    assert shares.rest_s("a", BURST_S / 2) == 0
    assert [*shares._paid_at] == ["a"]
