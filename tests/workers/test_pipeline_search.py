"""The search of nano-batches: its schedules break nothing, and are no worse for less work or a better device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.benchmarks.papers import pipeline
from motet.benchmarks.papers.pipeline_drawing import draw
from motet.benchmarks.papers.pipeline_search import (
    Layer,
    Performance,
    Resource,
    Schedule,
    Work,
    find_shares,
    find_sizes,
    in_sequence,
    shortest_ms,
)

RESOURCES: tuple[Resource, ...] = ("compute", "memory", "network")
SHARES = (0.25, 0.5, 0.75, 1.0)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Of two to four operations; each follows some of those before it, and all follow the first."""
    works = list[Work]()
    for number in range(draw(st.integers(2, 4))):
        after = [work.name for work in works if draw(st.booleans())] or [work.name for work in works[:1]]
        works.append(
            Work(
                f"op{number}",
                draw(st.sampled_from(RESOURCES)),
                draw(st.sampled_from([0.0, 0.1])),
                draw(st.integers(1, 8)) / 2048,
                tuple(after),
            )
        )
    return Layer(tuple(works))


@st.composite
def performances(draw: st.DrawFn) -> Performance:
    """At least the share itself, and never less with more of the device."""
    found: dict[Resource, list[tuple[float, float]]] = {}
    for resource in RESOURCES:
        reached = 0.0
        found[resource] = []
        for share in SHARES[:-1]:
            reached = max(reached, draw(st.sampled_from([share, (share + 1) / 2])))
            found[resource].append((share, reached))
        found[resource].append((1.0, 1.0))
    return found


def no_longer(one: Schedule, other: Schedule) -> bool:
    return one.period_ms <= other.period_ms * (1 + 1e-4)


@settings(max_examples=15, deadline=None)
@given(layers(), st.sampled_from([256, 512]))
def test_sizes_and_order_break_nothing(layer: Layer, num_rows: int) -> None:
    found = find_sizes(layer, num_rows, 2)
    assert found.violations() == []
    assert sum(found.sizes) == num_rows and all(rows % 128 == 0 and rows > 0 for rows in found.sizes)
    whole = in_sequence(layer, found.sizes)
    busiest = max(
        sum(one.duration_ms for one in whole.placed if one.operation.work.resource == resource)
        for resource in RESOURCES
    )
    assert busiest * (1 - 1e-4) <= found.period_ms and no_longer(found, whole)


@settings(max_examples=15, deadline=None)
@given(layers(), performances(), st.sampled_from([(128, 128), (128, 384)]))
def test_shares_break_nothing(layer: Layer, performance: Performance, sizes: tuple[int, int]) -> None:
    found = find_shares(layer, sizes, performance)
    assert found.violations(performance) == []
    assert shortest_ms(layer, sizes, performance) <= found.period_ms * (1 + 1e-4)
    assert no_longer(found, in_sequence(layer, sizes))


@settings(max_examples=8, deadline=None)
@given(layers(), performances(), st.data())
def test_more_work_takes_no_less(layer: Layer, performance: Performance, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(layer.works) - 1))
    slower = replace(layer.works[number], row_ms=1.5 * layer.works[number].row_ms)
    more = Layer((*layer.works[:number], slower, *layer.works[number + 1 :]))
    assert no_longer(find_sizes(layer, 512, 2), find_sizes(more, 512, 2))
    assert no_longer(find_shares(layer, (128, 384), performance), find_shares(more, (128, 384), performance))


@settings(max_examples=8, deadline=None)
@given(layers(), performances(), performances())
def test_a_device_that_does_more_takes_no_longer(layer: Layer, one: Performance, other: Performance) -> None:
    better = {
        resource: [
            (share, max(first, second))
            for (share, first), (_, second) in zip(one[resource], other[resource], strict=True)
        ]
        for resource in RESOURCES
    }
    assert no_longer(find_shares(layer, (128, 128), better), find_shares(layer, (128, 128), one))


CHAIN = Layer(
    (
        Work("product", "compute", 0.0, 1 / 256, ()),
        Work("attention", "memory", 0.0, 1 / 256, ("product",)),
        Work("reduce", "network", 0.0, 1 / 256, ("attention",)),
    )
)


def test_three_nano_batches_keep_three_resources_busy() -> None:
    """One alone takes turns; two must wait for their third operation; three take a third."""
    assert find_sizes(CHAIN, 768, 1).period_ms == pytest.approx(9.0)
    assert find_sizes(CHAIN, 768, 2).period_ms == pytest.approx(4.5)
    assert find_sizes(CHAIN, 768, 3).period_ms == pytest.approx(3.0)


def test_what_is_broken_is_seen() -> None:
    schedule = find_sizes(CHAIN, 768, 3)
    assert schedule.violations() == []
    assert "begins before" in replace(schedule, period_ms=2.0).violations()[0]
    moved = [replace(one, start_ms=0.0) if one.operation.work.name == "reduce" else one for one in schedule.placed]
    assert any(
        "product1 ends" in each or "attention1 ends" in each
        for each in replace(schedule, placed=tuple(moved)).violations()
    )
    fast = [replace(one, duration_ms=one.duration_ms / 2) for one in schedule.placed]
    assert "takes" in replace(schedule, placed=tuple(fast)).violations()[0]
    assert "missing" in replace(schedule, placed=schedule.placed[1:]).violations()[0]
    halves: Performance = {resource: [(share, share) for share in SHARES] for resource in RESOURCES}
    assert any("more than the device" in each for each in schedule.violations(halves))
    same = Layer(tuple(replace(work, resource="compute") for work in CHAIN.works))
    placed = tuple(
        replace(one, operation=replace(one.operation, work=replace(one.operation.work, resource="compute")))
        for one in schedule.placed
    )
    assert any("same resource" in each for each in replace(schedule, layer=same, placed=placed).violations())


def test_bad_layers_and_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="not all before it"):
        Layer((Work("late", "compute", 0.0, 1.0, ("later",)),))
    with pytest.raises(ValueError, match="a name of its own"):
        Layer(())
    with pytest.raises(ValueError, match="multiples of 128"):
        find_sizes(CHAIN, 100, 1)
    with pytest.raises(ValueError, match="one each at least"):
        find_sizes(CHAIN, 128, 2)


def test_the_published_numbers_stand_in_the_table() -> None:
    assert dict(pipeline.PERFORMANCE["memory"])[0.4] == 0.8 and dict(pipeline.PERFORMANCE["memory"])[0.2] == 0.3
    assert dict(pipeline.PERFORMANCE["network"])[0.1] == 0.3 and dict(pipeline.PERFORMANCE["network"])[0.9] == 1.0
    assert all(share == reached for share, reached in pipeline.PERFORMANCE["compute"])
    whole = in_sequence(pipeline.measured_layer(), (pipeline.NUM_ROWS,))
    assert whole.period_ms * pipeline.NUM_LAYERS == pytest.approx(sum(pipeline.MEASURED_MS.values()))


def test_a_drawing_has_a_box_for_each_run(tmp_path: Path) -> None:
    schedule = find_sizes(CHAIN, 768, 3)
    root = ElementTree.fromstring(draw(schedule))
    boxes = [one for one in root if one.tag.endswith("rect")]
    assert len(boxes) >= 2 * len(schedule.placed)
    assert {title.text.split(":")[0] for one in boxes for title in one if title.text} == {
        one.operation.name for one in schedule.placed
    }


def test_the_script_ends_with_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["pipeline", "--limit-s", "2", "--svg", str(tmp_path / "found.svg")])
    pipeline.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["over_published_split"] >= 1
    assert (tmp_path / "found.svg").read_text().startswith("<svg")
