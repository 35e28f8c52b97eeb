"""Where pins are: all routers agree, and only what must move moves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from motet.router.fleet.pin_keeper import PinPlaces, places_of

gangs = st.sets(st.sampled_from([f"gang-{number}" for number in range(8)]))
digests = st.sampled_from([f"{number:064x}" for number in range(12)])
changes = st.lists(st.tuples(digests, st.integers(0, 4)) | gangs, max_size=30)


@given(st.text("0123456789abcdef", min_size=4, max_size=8), gangs, st.integers(1, 5))
def test_a_gang_that_goes_moves_only_its_own_pins(digest: str, gangs: set[str], num: int) -> None:
    before = places_of(digest, gangs, num)
    assert len(before) == min(num, len(gangs)) and before == places_of(digest, sorted(gangs), num)
    for gone in gangs:
        after = places_of(digest, gangs - {gone}, num)
        if gone in before:
            assert [gang for gang in after if gang in before] == [gang for gang in before if gang != gone]
            assert len(after) == min(num, len(gangs) - 1)
        else:
            assert after == before
    assert before[: num - 1] == places_of(digest, gangs, num - 1)


@given(changes)
def test_what_is_kept_as_it_changes_is_what_is_computed_anew(changes: list[tuple[str, int] | set[str]]) -> None:
    places = PinPlaces()
    reported: dict[str, set[str]] = {}
    for change in changes:
        if isinstance(change, set):
            places.set_gangs(change)
            reported = {gang: reported.get(gang, set()) for gang in change}
        else:
            places.pin(*change)
        places.check_integrity()
        for gang, there in reported.items():
            for digest, is_there in places.take_changes(gang).items():
                assert (digest in there) is not is_there
                (there.add if is_there else there.discard)(digest)
            assert there == places.at(gang)


def test_pins_are_spread_evenly() -> None:
    places = PinPlaces()
    places.set_gangs([f"gang-{number}" for number in range(8)])
    for number in range(2000):
        places.pin(f"{number:064x}", 2)
    counts = Counter(gang for number in range(2000) for gang in places.of(f"{number:064x}"))
    assert sum(counts.values()) == 4000 and min(counts.values()) > 400 and max(counts.values()) < 600
