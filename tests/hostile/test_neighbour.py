"""The neighbour itself: what all attacks are measured by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from motet.tests.rigs.held_loop import HeldLoop
from motet.tests.rigs.neighbour import Neighbour, Waits, are_kept


def test_quiet_is_no_attack(holds: Callable[..., None]) -> None:
    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    holds(nothing, at_most=1.5)


def test_a_wrong_key_is_no_answer(neighbour: Neighbour) -> None:
    waits = Neighbour(neighbour.url, "unknown-key", neighbour.model).measured_for(0.1)
    assert not waits.first_token_s and "401" in waits.errors[0]
    assert waits.quantile_s(0.5) == float("inf")


@pytest.mark.parametrize(
    ("waits_ms", "held_ms", "num_idle", "kept"),
    [
        ([10] * 100, 2.5, 1.0, True),
        ([10] * 90 + [40] * 10, 2.5, 1.0, False),  # the machine had time
        ([10] * 90 + [40] * 10, 2.5, 0.1, True),  # it had none, and the router took none
        ([10] * 90 + [40] * 10, 50, 0.1, False),
        ([40] * 100, 2.5, 0.1, False),  # most of the waits are long
    ],
)
def test_one_wait_of_a_hundred_counts_unless_the_machine_is_busy(
    waits_ms: list[float], held_ms: float, num_idle: float, kept: bool
) -> None:
    quiet, attacked = Waits([0.01] * 100), Waits([wait_ms / 1000 for wait_ms in waits_ms])
    held = HeldLoop(Counter({0.001: 90, held_ms / 1000: 100, float("inf"): 100}))
    assert are_kept([quiet, quiet], attacked, held, num_idle, at_most=2.0) == kept
    attacked.errors.append("a chat that was not answered")
    assert not are_kept([quiet, quiet], attacked, held, num_idle, at_most=2.0)
