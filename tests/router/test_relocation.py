"""Which waiting sequences move to another gang: never for nothing, never back and forth, and at a bounded cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.router.fleet.affinity import GangCosts
from motet.router.fleet.relocator import (
    GangQueue,
    Relocation,
    RelocationConfig,
    TokensBefore,
    WaitingSequence,
    relocations,
)

CONFIG = RelocationConfig()
SLOW = GangCosts(s_per_waiting_token=0.01, s_per_queued_token=0.01)


def sequence(
    num_tokens: int = 10, *, digest: str | None = None, num_pages: int = 0, num_cached: int = 0, num_moves: int = 0
) -> WaitingSequence:
    return WaitingSequence(digest, num_pages, num_tokens, num_cached, num_moves)


def before_all(num_queued_tokens: int) -> TokensBefore:
    """Of a gang with one tenant."""
    return lambda tenant, weight, num_more, num_more_of_all: num_queued_tokens + num_more_of_all


def queue(
    key: str,
    newest: list[WaitingSequence],
    *,
    num_waiting: int | None = None,
    num_tokens: int | None = None,
    costs: GangCosts = SLOW,
    adapters: frozenset[str] = frozenset(),
    oldest_s: float = 0.0,
    takes: bool = True,
    before: TokensBefore | None = None,
) -> GangQueue:
    total = sum(one.num_tokens for one in newest) if num_tokens is None else num_tokens
    return GangQueue(
        key,
        total,
        len(newest) if num_waiting is None else num_waiting,
        oldest_s,
        costs,
        len(newest),
        newest,
        adapters.__contains__,
        before_all(total) if before is None else before,
        takes,
    )


def test_a_new_gang_gets_its_half() -> None:
    moves = relocations([queue("a", [sequence()] * 80), queue("b", [], costs=GangCosts())], CONFIG)
    assert 25 <= len(moves) <= 40
    assert moves == [Relocation("a", place, "b") for place in range(len(moves))]  # the newest


def test_a_queue_that_stands_still_shows_in_who_has_waited() -> None:
    """No token of the queue was computed yet, so nothing is known of its costs."""
    a = queue("a", [sequence(2)] * 80, costs=GangCosts())
    assert not relocations([a, queue("b", [])], CONFIG)
    assert len(relocations([replace(a, oldest_waiting_s=5.0), queue("b", [])], CONFIG)) > 25


def test_nothing_moves_to_a_queue_as_long() -> None:
    queues = [queue(key, [sequence()] * 80) for key in "abc"]
    assert not relocations(queues, CONFIG)


def test_nothing_moves_for_little() -> None:
    assert not relocations([queue("a", [sequence()] * 2), queue("b", [])], CONFIG)


def test_a_cold_load_must_be_worth_it() -> None:
    costs = replace(SLOW, s_per_page=1.0)
    a = queue("a", [sequence(digest="x", num_pages=30)] * 80, costs=costs)  # the newest waits 8 s
    cold, warm = queue("b", [], costs=costs), queue("b", [], costs=costs, adapters=frozenset("x"))
    assert not relocations([a, cold], CONFIG)
    assert len(relocations([a, warm], CONFIG)) > 25


def test_a_kept_beginning_must_be_worth_it() -> None:
    a = queue("a", [sequence(num_cached=10_000)] * 80)
    assert not relocations([a, queue("b", [])], CONFIG)


def test_who_has_moved_often_must_gain_more() -> None:
    assert relocations([queue("a", [sequence(num_moves=1)] * 80), queue("b", [])], CONFIG)
    assert not relocations([queue("a", [sequence(num_moves=6)] * 80), queue("b", [])], CONFIG)


def test_a_gang_that_has_not_reported_yet_gets_no_more() -> None:
    assert not relocations([queue("a", [sequence()] * 80), queue("b", [], takes=False)], CONFIG)


@pytest.mark.parametrize("num_routers", [2, 4, 8])
def test_routers_together_move_as_much_as_one_would(num_routers: int) -> None:
    own = [sequence()] * (80 // num_routers)
    part = relocations([queue("a", own, num_waiting=80, num_tokens=800), queue("b", [])], CONFIG)
    assert 20 <= num_routers * len(part) <= 48


costs = st.builds(
    GangCosts,
    s_per_queued_token=st.floats(1e-5, 0.1),
    s_per_page=st.floats(0, 0.01),
    num_evictions_per_load=st.floats(0, 2),
    s_per_waiting_token=st.floats(1e-5, 0.1),
)
sequences = st.builds(
    sequence,
    st.integers(1, 3000),
    digest=st.sampled_from([None, "x", "y"]),
    num_pages=st.integers(0, 50),
    num_cached=st.integers(0, 500),
    num_moves=st.integers(0, 5),
)


@st.composite
def fleets(draw: st.DrawFn) -> list[GangQueue]:
    """Several gangs; some of what waits is other routers', or is computed already."""
    found = []
    kinds = draw(st.lists(sequences, min_size=1, max_size=4))
    for key in "abcd"[: draw(st.integers(1, 4))]:
        own = [kinds[place % len(kinds)] for place in range(draw(st.integers(0, 40)))]
        found.append(
            queue(
                key,
                own,
                num_waiting=draw(st.integers(0, 60)),
                num_tokens=sum(one.num_tokens for one in own) + draw(st.integers(0, 20_000)),
                costs=draw(costs),
                adapters=draw(st.sampled_from([frozenset[str](), frozenset("x"), frozenset("xy")])),
                oldest_s=draw(st.floats(0, 30)),
                takes=draw(st.booleans()),
            )
        )
    return found


@given(fleets())
def test_moves_are_bounded_and_only_of_what_waits(queues: list[GangQueue]) -> None:
    config = RelocationConfig(max_sequences=7, max_tokens=5000)
    moves = relocations(queues, config)
    by_key = {one.key: one for one in queues}
    assert len({(move.source, move.place) for move in moves}) == len(moves) <= 7
    moved = [by_key[move.source].newest[move.place] for move in moves]
    assert sum(one.num_tokens + one.num_cached_tokens for one in moved[:-1]) < 5000
    for move in moves:
        assert move.source != move.target
        assert by_key[move.target].takes
        assert move.place < by_key[move.source].num_waiting  # the others run as far as is known
    assert relocations(queues[::-1], config) == moves  # the order of the gangs does not matter


@given(fleets(), st.integers(0, 30))
def test_nothing_moves_back(queues: list[GangQueue], num_reported: int) -> None:
    """What has moved does not move again while costs stay, whether few or all of the moves have been reported."""
    queues = [replace(one, num_waiting=one.num_own, oldest_waiting_s=0.0) for one in queues[:2]]  # one router
    moves = relocations(queues, CONFIG)[: num_reported + 1]
    if not moves:
        return
    source = next(one for one in queues if one.key == moves[0].source)
    target = next(one for one in queues if one.key == moves[0].target)
    moved = [source.newest[move.place] for move in moves]
    came = [replace(one, num_tokens=one.num_tokens + one.num_cached_tokens, num_cached_tokens=0) for one in moved]
    num_left = source.num_queued_tokens - sum(one.num_tokens for one in moved)
    num_longer = target.num_queued_tokens + sum(one.num_tokens for one in came)
    left = replace(
        source,
        num_queued_tokens=num_left,
        num_before=before_all(num_left),
        num_waiting=source.num_waiting - len(moves),
        takes=True,
    )
    longer = replace(
        target,
        num_queued_tokens=num_longer,
        num_before=before_all(num_longer),
        num_waiting=target.num_waiting + len(moves),
        num_own=len(came),
        newest=came[::-1],
        takes=True,
    )
    assert not [move for move in relocations([left, longer], CONFIG) if move.source == target.key]


def test_its_cost_follows_what_is_examined() -> None:
    """Each sequence that is given is compared with a few gangs, however many there are."""
    num_requested = 0

    def has(digest: str) -> bool:
        nonlocal num_requested
        num_requested += 1
        return False

    own = [sequence(digest="x", num_pages=10**9)] * 32
    queues = [replace(queue(f"{n}", own), has_adapter=has) for n in range(16)]
    lengths = [100 * n for n in range(16)]
    relocations(
        [replace(q, num_queued_tokens=n, num_before=before_all(n)) for q, n in zip(queues, lengths, strict=True)],
        CONFIG,
    )
    assert 0 < num_requested <= 16 * 32 * CONFIG.max_targets
