"""The router's own watchdog, over all attacks of the files before this one."""

from __future__ import annotations

from motet.tests.rigs.held_loop import HeldLoop, held_since
from motet.tests.rigs.neighbour import LOOP_HELD_S
from motet.tests.rigs.running_motet import RunningMotet


def test_the_loop_was_not_held(motet: RunningMotet, held_before: HeldLoop) -> None:
    """In CPU time of the router's process, so that others on this machine do not count."""
    held = held_since(held_before, motet)
    print(held)
    assert held.quantile_s(0.99) <= LOOP_HELD_S, held
    assert held.quantile_s(0.999) <= 0.1, held
