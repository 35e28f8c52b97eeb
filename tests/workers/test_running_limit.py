"""How many sequences of a tenant an engine has at once, and which come next."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from motet.tests.rigs.leader_rig import TOKEN, Router, submit
from motet.tests.rigs.part_configs import leader_config
from motet.tests.rigs.patience import eventually_in_loop as eventually
from motet.tests.rigs.stand_in_engine import INFO, StandInEngine
from motet.workers.leader.frame_server import FrameServer
from motet.workers.leader.queue_limit import RunningLimit
from motet.workers.wire.beams import BeamRules
from motet.workers.wire.messages import Cancel, SamplingParams, SequenceRequest, Submit

actions = st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(0, 40)), max_size=80)


def requested(engine_id: int, tenant: str, width: int = 1) -> SequenceRequest:
    """A search with so many beams, if they are several."""
    request = SequenceRequest(sequence_id=engine_id, prompt_token_ids=[1, 2], sampling=SamplingParams(), tenant=tenant)
    return request if width == 1 else msgspec.structs.replace(request, beams=BeamRules(width, 3, frozenset()))


@given(actions, st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_each_tenant_in_turn_and_never_more_than_its_places(
    todo: list[tuple[bool, str, int]], num_places: int, widths: list[int]
) -> None:
    places = RunningLimit(num_places)
    inside: dict[int, str] = {}
    outside: dict[int, str] = {}  # the oldest first

    def size(number: int) -> int:
        return widths[number % len(widths)]

    def num_used(tenant: str) -> int:
        return sum(size(one) for one, owner in inside.items() if owner == tenant)

    for number, (comes, tenant, which) in enumerate(todo):
        if comes:
            if places.enter(requested(number, tenant, size(number))):
                assert tenant not in outside.values(), "it overtook another one of its tenant"
                inside[number] = tenant
            else:
                outside[number] = tenant
        else:
            inside.pop(which, None)
            outside.pop(which, None)
            for request in places.leave(which):
                oldest = next(one for one, owner in outside.items() if owner == request.tenant)
                assert request.sequence_id == oldest
                inside[oldest] = outside.pop(oldest)
        places.check_integrity()
        assert places.num_held == len(outside)
        for owner in "ab":
            assert num_used(owner) <= num_places or [*inside.values()].count(owner) == 1
            if owner in outside.values():
                first = next(one for one, held_by in outside.items() if held_by == owner)
                assert num_used(owner) and num_used(owner) + size(first) > num_places


async def test_who_has_its_share_waits_though_there_are_places() -> None:
    engine = StandInEngine()
    config = leader_config(max_num_sequences=4, tenant_running_share=0.5)
    server = FrameServer(engine, INFO, TOKEN, config)
    router = Router(await server.start("127.0.0.1"))
    await router.read()
    acme = [submit(number, 0, None) for number in range(1, 6)]
    globex = Submit(SequenceRequest(sequence_id=9, prompt_token_ids=[1], sampling=SamplingParams(), tenant="globex"))
    await router.send(*acme, globex)
    await eventually(lambda: len(engine.submitted) == 3)
    assert sorted(request.tenant for request in engine.submitted) == ["acme", "acme", "globex"]
    await eventually(lambda: server.load.gauges.num_waiting == 3)

    await router.send(Cancel(3), Cancel(1))  # one that waits, and one that runs
    await eventually(lambda: len(engine.submitted) == 4)
    await eventually(lambda: server.load.gauges.num_waiting == 1)
    await router.channel.close()
    await eventually(lambda: engine.num_running == 0)
    await server.stop()


@given(actions, st.lists(st.none() | st.integers(1, 4), min_size=1, max_size=8))
def test_a_share_that_changes_lets_in_who_has_a_place_and_ends_none(
    todo: list[tuple[bool, str, int]], shares: list[int | None]
) -> None:
    places = RunningLimit(shares[0])
    inside: dict[int, str] = {}
    outside: dict[int, str] = {}  # the oldest first
    for number, (comes, tenant, which) in enumerate(todo):
        if comes and places.enter(requested(number, tenant)):
            inside[number] = tenant
        elif comes:
            outside[number] = tenant
        elif outside.pop(which, None) is None:
            inside.pop(which, None)
            for following in places.leave(which):
                inside[following.sequence_id] = outside.pop(following.sequence_id)
        else:
            assert not places.leave(which)
        if number % 5 == 4:
            before = dict(inside)
            share = shares[number // 5 % len(shares)]
            for request in places.change(share):
                assert request.sequence_id == next(one for one, held_by in outside.items() if held_by == request.tenant)
                inside[request.sequence_id] = outside.pop(request.sequence_id)
            assert before.items() <= inside.items()
            assert not (share is None and outside)
        places.check_integrity()
        assert places.num_held == len(outside)


async def test_a_leader_takes_another_share_over_as_it_runs() -> None:
    engine = StandInEngine()
    config = leader_config(max_num_sequences=4, tenant_running_share=0.25)
    server = FrameServer(engine, INFO, TOKEN, config)
    router = Router(await server.start("127.0.0.1"))
    await router.read()
    await router.send(*(submit(number, 0, None) for number in range(1, 6)))
    await eventually(lambda: server.load.gauges.num_waiting == 4)
    assert len(engine.submitted) == 1
    server.change(leader_config(max_num_sequences=4, tenant_running_share=0.75))
    await eventually(lambda: len(engine.submitted) == 3)
    server.change(leader_config(max_num_sequences=4, tenant_running_share=1.0))
    await eventually(lambda: len(engine.submitted) == 5)
    await router.channel.close()
    await eventually(lambda: engine.num_running == 0)
    await server.stop()
