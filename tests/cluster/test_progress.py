"""What `motet serve` shows while it starts."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest
from rich.console import Console

from motet.cluster.progress import ProgressDisplay, step
from motet.tests.rigs.patience import eventually

LONG_S = 3600.0


def lines_of(output: io.StringIO) -> list[str]:
    return output.getvalue().splitlines()


def display(output: io.StringIO, silence_s: float = LONG_S) -> ProgressDisplay:
    return ProgressDisplay(Console(file=output), silence_s)


def test_a_step_is_shown_when_it_begins_and_then_at_each_tenth() -> None:
    output = io.StringIO()
    with display(output) as progress:
        with step(progress, "starting Ray"):
            assert lines_of(output) == ["starting Ray"]
        for done in range(101):
            progress("loading weights", done, 100)
        progress("nothing to load", 0, 0)
    tenths = [f"loading weights: {10 * tenth}%" for tenth in range(11)]
    assert lines_of(output) == ["starting Ray", *tenths, "nothing to load: 100%"]


def test_a_long_wait_is_shown_with_its_reason() -> None:
    output = io.StringIO()
    with display(output, silence_s=0.01) as progress:
        progress("starting Ray", 0, 1)
        progress("starting Ray", 1, 1)
        num_before = len(lines_of(output))
        progress("loading weights", 1, 7)
        progress("starting a router", 0, 1)
        waiting = "still loading weights, starting a router, after "
        eventually(lambda: any(line.startswith(waiting) for line in lines_of(output)), output.getvalue)
    assert not any(line.startswith("still") and "Ray" in line for line in lines_of(output)[num_before:])


def test_a_step_that_fails_has_ended() -> None:
    events: list[tuple[str, int, int]] = []
    with pytest.raises(RuntimeError), step(lambda *event: events.append(event), "starting Ray"):
        raise RuntimeError("Ray is ill")
    assert events == [("starting Ray", 0, 1), ("starting Ray", 1, 1)]


def still(output: io.StringIO, num_before: int) -> list[str]:
    return [line for line in lines_of(output)[num_before:] if line.startswith("still ")]


def test_what_has_failed_is_not_still_being_done() -> None:
    output = io.StringIO()
    with display(output, silence_s=0.01) as progress:
        with suppress(TimeoutError), step(progress, "starting Ray Serve"):
            raise TimeoutError
        with step(progress, "starting Ray"):
            num_before = len(lines_of(output))
            eventually(lambda: still(output, num_before), output.getvalue)
            shown = still(output, num_before)[0]
    assert shown.startswith("still starting Ray, after ")


def test_a_terminal_shows_bars() -> None:
    output = io.StringIO()
    with ProgressDisplay(Console(file=output, force_terminal=True)) as progress:
        with step(progress, "starting Ray"):
            pass
        progress("loading weights", 3, 4)
    assert "starting Ray" in output.getvalue()
    assert "75%" in output.getvalue()
    assert "still" not in output.getvalue()
