"""A tier's directory against a plain model: what it holds, what goes first, and that nothing goes while it is read."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from motet.workers.memory.tier_slots import TierSlots

KEYS = [bytes([number]) for number in range(9)]


@given(st.integers(0, 2**32), st.integers(0, 6))
def test_random_use_of_a_small_tier(seed: int, num_slots: int) -> None:
    rng = random.Random(seed)
    tier = TierSlots(num_slots)
    held: dict[bytes, int] = {}  # the least recently used first
    writing: dict[bytes, int] = {}
    readers: list[list[bytes]] = []

    def touch(keys: list[bytes]) -> None:
        held.update({key: held.pop(key) for key in keys if key in held})

    def is_read(key: bytes) -> bool:
        return any(key in keys for keys in readers)

    for _ in range(80):
        key = rng.choice(KEYS)
        some = [one for one in held if rng.random() < 0.4]
        match rng.randrange(7):
            case 0 if key not in held and key not in writing:
                victim = next((one for one in held if not is_read(one)), None)
                is_full = len(held) + len(writing) == num_slots
                slot = tier.reserve(key)
                assert (slot is None) == (is_full and victim is None)
                if slot is not None:
                    if is_full and victim is not None:
                        assert slot == held.pop(victim)
                    assert slot not in held.values()
                    assert slot not in writing.values()
                    writing[key] = slot
            case 1:
                held |= writing
                tier.written([*writing])
                writing.clear()
            case 2:
                tier.fail([*writing])
                writing.clear()
            case 3:
                touch(some)
                assert tier.begin_read(some) == tuple(held[one] for one in some)
                readers.append(some)
            case 4 if readers:
                tier.end_read(readers.pop(rng.randrange(len(readers))))
            case 5:
                tier.touch([key])
                touch([key])
            case 6:
                tier.drop(key)
                if not is_read(key):
                    held.pop(key, None)
        tier.check_integrity()
        assert {one for one in KEYS if one in tier} == held.keys()
        assert {one for one in KEYS if tier.is_coming(one)} == writing.keys()
        assert [*tier.oldest()] == [one for one in held if not is_read(one)]
        assert (tier.num_held, tier.num_free) == (len(held), num_slots - len(held) - len(writing))
