"""The neighbour itself: what all attacks are measured by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from motet.tests.rigs.neighbour import Neighbour, hold


def test_quiet_is_no_attack(neighbour: Neighbour) -> None:
    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    hold(neighbour, nothing, at_most=1.5)


def test_a_wrong_key_is_no_answer(neighbour: Neighbour) -> None:
    waits = Neighbour(neighbour.url, "nobody's", neighbour.model).measured_for(0.1)
    assert not waits.first_token_s and "401" in waits.errors[0]
    assert waits.quantile_s(0.5) == float("inf")
