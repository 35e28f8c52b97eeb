"""A tier's directory against a plain model: what it holds, what goes first, and that nothing goes while it is read."""

from __future__ import annotations

import random
from itertools import chain, takewhile

from hypothesis import given
from hypothesis import strategies as st

from motet.workers.scheduling.tier_traffic import TierSlots

KEYS = [bytes([number]) for number in range(9)]
NUM_STATE_PAGES = 3
STATES = {KEYS[2], KEYS[5]}  # keys of states; the others are those of a page each


@given(st.integers(0, 2**32), st.integers(0, 9))
def test_random_use_of_a_small_tier(seed: int, num_slots: int) -> None:
    rng = random.Random(seed)
    tier = TierSlots(num_slots)
    held: dict[bytes, tuple[int, ...]] = {}  # in the order of writing
    worths: dict[bytes, float] = {}
    floor = 0.0
    writing: dict[bytes, tuple[int, ...]] = {}
    readers: list[list[bytes]] = []

    def in_order() -> list[bytes]:
        newest_first = [key for key in reversed(held) if not is_read(key)]
        return sorted(newest_first, key=worths.__getitem__)

    def is_read(key: bytes) -> bool:
        return any(key in keys for keys in readers)

    def first(num_pages: int) -> list[bytes]:
        """The first of those in order that have so many pages, or all."""
        keys = in_order()
        sizes = [sum(len(held[key]) for key in keys[:number]) for number in range(len(keys))]
        return keys[: sum(size < num_pages for size in sizes)]

    for _ in range(80):
        key = rng.choice(KEYS)
        some = [one for one in held if rng.random() < 0.4]
        match rng.randrange(7):
            case 0 if key not in held and key not in writing:
                num_pages = NUM_STATE_PAGES if key in STATES else 1
                num_free = num_slots - sum(map(len, (*held.values(), *writing.values())))
                victims = first(num_pages - num_free)
                has_room = num_free + sum(len(held[one]) for one in victims) >= num_pages
                slots = tier.reserve(key, num_pages)
                assert (slots is not None) == has_room, "a state takes all of its slots or none"
                if slots is not None:
                    for victim in victims:
                        floor = max(floor, worths[victim])
                        del held[victim]
                    assert len(slots) == num_pages
                    assert not {*slots} & {*chain(*held.values(), *writing.values())}
                    writing[key] = slots
            case 1:
                held |= writing
                worths |= dict.fromkeys(writing, floor + 1)
                tier.written([*writing])
                writing.clear()
            case 2:
                tier.fail([*writing])
                writing.clear()
            case 3:
                assert tier.begin_read(some) == tuple(chain(*(held[one] for one in some)))
                readers.append(some)
            case 4 if readers:
                tier.end_read(readers.pop(rng.randrange(len(readers))))
            case 5:
                tier.touch([key])
                worths[key] = floor + 2
            case 6:
                tier.drop(key)
                if not is_read(key):
                    held.pop(key, None)
        tier.check_integrity()
        assert {one for one in KEYS if one in tier} == held.keys()
        assert {one for one in KEYS if tier.is_coming(one)} == writing.keys()
        assert tier.least_worth(NUM_STATE_PAGES * len(KEYS)) == in_order()
        assert tier.least_worth(2) == first(2)
        num_held, num_writing = (sum(map(len, pages.values())) for pages in (held, writing))
        assert (tier.num_held, tier.num_free) == (num_held, num_slots - num_held - num_writing)


def serve_in_turns(num_slots: int, num_prefixes: int, num_pages: int, num_rounds: int) -> list[int]:
    """How many pages of each prefix are found in the last round, if all are used one after the other."""
    tier, found = TierSlots(num_slots), list[int]()
    for _ in range(num_rounds):
        found.clear()
        for prefix in range(num_prefixes):
            keys = [bytes([prefix, page]) for page in range(num_pages)]
            here = list(takewhile(tier.__contains__, keys))
            tier.touch(here)
            for key in keys:
                if key not in tier and tier.reserve(key) is not None:
                    tier.written([key])
            tier.check_integrity()
            found.append(len(here))
    return found


def test_what_is_used_in_turns_stays_whole_as_far_as_there_is_room() -> None:
    """The least recently used page is always the next one that is needed: by that order none would be found."""
    found = serve_in_turns(num_slots=90, num_prefixes=10, num_pages=10, num_rounds=8)
    assert sum(found) >= 70
    assert found.count(10) >= 6


def test_what_was_used_long_ago_goes_in_the_end() -> None:
    tier = TierSlots(8)
    for number in range(40):
        key = bytes([number])
        assert tier.reserve(key) is not None
        tier.written([key])
        if number < 8:
            tier.touch([key])
    assert not any(bytes([number]) in tier for number in range(8))
