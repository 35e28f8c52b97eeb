"""The load of an engine as it is summed and shown."""

from __future__ import annotations

from motet.tests.rigs.engine_loads import engine_load
from motet.workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad, summed


def test_gangs_add_up_but_for_the_oldest_wait() -> None:
    loads = [
        engine_load(num_running=2, oldest_waiting_s=3.0, num_steps=5, busy_s=0.5),
        engine_load(num_running=1, oldest_waiting_s=4.0, num_steps=6, busy_s=0.25),
    ]
    assert summed(loads) == engine_load(num_running=3, oldest_waiting_s=4.0, num_steps=11, busy_s=0.75)
    assert summed(loads[:1]) == loads[0]


def test_it_is_shown_flat_with_no_two_values_of_one_name() -> None:
    flat = engine_load(num_running=2, num_steps=5).flat()
    assert (flat["num_running"], flat["num_steps"], flat["busy_s"]) == (2, 5, 0.0)
    assert len(flat) == len(EngineGauges.__struct_fields__) + len(EngineCounters.__struct_fields__)
    assert EngineLoad() == EngineLoad(EngineGauges(), EngineCounters())
