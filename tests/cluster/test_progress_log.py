"""Progress reported through a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.cluster.progress import ProgressReader, ProgressWriter, step


def test_the_last_event_of_a_name_always_arrives(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    events: list[tuple[str, int, int]] = []
    read = ProgressReader(path, lambda *event: events.append(event))
    read()  # the file is not there yet
    write = ProgressWriter(path)
    for done in range(1, 1001):
        write("weights", done, 1000)
    read()
    assert events[0] == ("weights", 1, 1000)
    assert events[-1] == ("weights", 1000, 1000)
    assert len(events) < 1000  # not one for each
    write("pool", 1, 1)
    read()
    assert events[-1] == ("pool", 1, 1)
    num_events = len(events)
    read()
    assert len(events) == num_events


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    events: list[tuple[str, int, int]] = []
    read = ProgressReader(path, lambda *event: events.append(event))
    path.write_text('["weights", 1, 2]\n["wei')
    read()
    assert events == [("weights", 1, 2)]
    with path.open("a") as file:
        file.write('ghts", 2, 2]\n')
    read()
    assert events == [("weights", 1, 2), ("weights", 2, 2)]


@pytest.mark.parametrize("path", [Path("/dev/full"), Path("/no-such-folder/progress")])
def test_what_cannot_be_written_stops_no_caller(path: Path) -> None:
    assert path.exists() != path.parent.name.startswith("no-such")
    has_run = False
    with step(ProgressWriter(path), "loading torch"):
        has_run = True
    assert has_run
