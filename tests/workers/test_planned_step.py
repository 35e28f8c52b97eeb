"""A plan's sequences: those of one adapter are neighbours, so that kernels read it once for all of them."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from motet.tests.rigs.scheduler_rig import Worker, limits, request, scheduler
from motet.workers.scheduling.planned_step import grouped

members = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers()))


@given(members)
def test_members_of_an_adapter_are_neighbours_in_their_order(given: list[tuple[str | None, int]]) -> None:
    found = grouped(given, lambda member: member[0])
    adapters = [adapter for adapter, _ in groupby(found, key=lambda member: member[0])]
    assert len(set(adapters)) == len(adapters)
    for adapter in {member[0] for member in given}:
        assert [each for each in found if each[0] == adapter] == [each for each in given if each[0] == adapter]
    assert len(found) == len(given)


def test_decodes_of_an_adapter_are_neighbours_in_a_plan() -> None:
    """However they arrived: LoRA's kernels then take them as one segment."""
    of = limits(64, budget=64)
    s, worker = scheduler(of), Worker(of)
    for index in range(6):
        s.add(request(index, num_prompt=4, max_tokens=8, adapter=("a1", "b2", None)[index % 3]), 0)
    for _ in range(4):
        plan = s.schedule()
        s.commit(plan, worker.execute(plan))
    assert sum(len(part.token_ids) for part in plan.sequences) == 6, "all of them decode"
    assert [part.adapter for part in plan.sequences] == ["a1", "a1", "b2", "b2", None, None]
