"""The policy as Ray Serve calls it: what it reads from a context, how Serve wraps it, what gangs report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from motet.cluster.replicas.autoscaler import (
    GangAutoscaler,
    autoscaling_config,
    fleet_state,
    gang_load,
    gang_stats,
    growth_per_s,
)
from motet.cluster.scaling import GangLoad
from motet.cluster.settings.setting_field import ConfigError
from motet.tests.rigs.engine_loads import engine_load
from motet.tests.rigs.part_configs import scaling_config

GANGS = DeploymentID(name="gang", app_name="motet")
SCALING = scaling_config(min_gangs=0, max_gangs=4, queued_tokens_per_gang=1000)
CONFIG = autoscaling_config(SCALING)


@dataclass(frozen=True)
class Reported:
    """What one replica reported at two times, a second apart."""

    first: dict[str, float]
    last: dict[str, float]


def stats(**load: int) -> dict[str, float]:
    return gang_stats(engine_load(num_pages=100, num_free_pages=100, **load), max_num_sequences=10)


def context(
    target: int, reported: Sequence[Reported | None], num_calls: int = 0, state: dict[str, Any] | None = None
) -> AutoscalingContext:
    """A context with one entry of `reported` for each running replica; None: it has reported nothing yet."""
    replicas = [ReplicaID(unique_id=str(number), deployment_id=GANGS) for number in range(len(reported))]
    series: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    means: dict[str, dict[ReplicaID, float]] = {}
    for replica, numbers in zip(replicas, reported, strict=True):
        for name in numbers.last if numbers is not None else ():
            assert numbers is not None
            samples = [TimeStampedValue(10.0, numbers.first[name]), TimeStampedValue(11.0, numbers.last[name])]
            series.setdefault(name, {})[replica] = samples
            means.setdefault(name, {})[replica] = numbers.last[name]
    return AutoscalingContext(
        deployment_id=GANGS,
        deployment_name=GANGS.name,
        app_name=GANGS.app_name,
        current_num_replicas=len(reported),
        target_num_replicas=target,
        running_replicas=replicas,
        total_num_requests=num_calls,
        total_queued_requests=num_calls,
        aggregated_metrics=lambda: means,
        raw_metrics=lambda: series,
        capacity_adjusted_min_replicas=SCALING.min_gangs,
        capacity_adjusted_max_replicas=SCALING.max_gangs,
        policy_state={} if state is None else state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=1.0,
        config=CONFIG,
    )


@pytest.fixture
def policy() -> Any:
    """The policy as Serve makes and wraps it."""
    return _apply_autoscaling_config(CONFIG.policy.get_policy()(**CONFIG.policy.policy_kwargs))


def test_a_configuration_of_serve_may_say_the_policys_settings_by_their_keys() -> None:
    by_key = GangAutoscaler(settings={"pool-pressure": 0.5, "scaling-window": 10, "max-tokens-per-step": 100})
    said = by_key._config
    assert (said.pool_pressure, said.window_s, said.queued_tokens_per_gang) == (0.5, 10.0, 1600)
    with pytest.raises(ConfigError, match="did you mean pool-pressure"):
        GangAutoscaler(settings={"pool-presure": 0.5})
    with pytest.raises(ConfigError, match="set it in args"):
        GangAutoscaler(settings={"name": "x"})


def test_serve_takes_the_policy_as_json_and_brings_it_back() -> None:
    json.dumps(CONFIG.policy.policy_kwargs)
    assert CONFIG.policy.get_policy().__name__ == GangAutoscaler.__name__
    assert (CONFIG.min_replicas, CONFIG.initial_replicas, CONFIG.max_replicas) == (0, 1, 4)
    assert autoscaling_config(SCALING, is_update=True).initial_replicas is None


def test_what_serve_knows_becomes_a_state() -> None:
    busy = Reported(
        stats(num_computed_tokens=100), stats(num_computed_tokens=400, num_waiting=2, num_queued_tokens=700)
    )
    state = fleet_state(context(3, [busy, None], num_calls=1), now_s=5.0)
    assert (state.now_s, state.target, state.num_running, state.is_awaited) == (5.0, 3, 2, True)
    assert state.gangs == (GangLoad(num_sequences=2, queued_tokens=700, computed_tokens_per_s=300),)


def test_serve_adds_no_delay_on_the_way_up(policy: Any) -> None:
    swamped = Reported(stats(), stats(num_waiting=9, num_queued_tokens=2500))
    assert policy(context(1, [swamped]))[0] == 3


def test_a_starting_gang_survives_until_it_has_reported_its_load(policy: Any) -> None:
    state: dict[str, Any] = {}
    for reported in ([], [], [None], [None]):
        target, state = policy(context(1, reported, state=state))
        assert target == 1


def test_a_waiting_call_brings_the_first_gang_and_no_call_none(policy: Any) -> None:
    target, state = policy(context(0, []))
    assert target == 0
    target, state = policy(context(0, [], num_calls=1, state=state))
    assert target == 1
    assert policy(context(1, [], state=state))[0] == 1  # the caller has left


def test_the_history_survives_serves_keeping(policy: Any) -> None:
    """The delays are over at once, so only the history can have seen the load."""
    hasty = scaling_config(min_gangs=0, max_gangs=4, scale_down_after_s=0.0, scale_to_zero_after_s=1000.0, window_s=1.0)
    config = autoscaling_config(hasty)
    hasty_policy = _apply_autoscaling_config(config.policy.get_policy()(**config.policy.policy_kwargs))
    idle = Reported(stats(), stats())
    target, state = hasty_policy(context(3, [idle] * 3))
    target, state = hasty_policy(context(3, [idle] * 3, state=state))
    assert target == 1
    assert hasty_policy(context(1, [idle], state=state))[0] == 1


@given(st.integers(0, 200), st.integers(0, 50), st.integers(0, 20))
def test_pressure_is_of_the_scarcer_of_pages_and_places(num_kv: int, num_idle: int, num_running: int) -> None:
    load = engine_load(
        num_pages=250,
        num_free_pages=250 - num_kv - num_idle,
        num_adapter_pages=num_idle,
        num_idle_adapter_pages=num_idle,
        num_running=num_running,
        num_queued_tokens=num_running,
    )
    reported = gang_stats(load, max_num_sequences=20)
    assert reported["pool_pressure"] == max(num_kv / 250, num_running / 20)
    assert reported["queued_tokens"] == 0  # the next token of a running one does not wait


def test_an_empty_pool_that_fills_is_no_reason_for_more_gangs() -> None:
    def series(**last: int) -> GangLoad:
        first, then = stats(), stats(**last)
        return gang_load(
            {}, {name: [TimeStampedValue(0, first[name]), TimeStampedValue(2, then[name])] for name in first}
        )

    assert series(num_adapter_loads=50).adapter_loads_per_s == 0
    assert series(num_adapter_loads=50, num_adapter_evictions=20).adapter_loads_per_s == 10
    assert series(num_adapter_loads=5, num_adapter_evictions=20).adapter_loads_per_s == 2.5  # KV took the room


def test_a_counter_that_began_anew_did_not_shrink() -> None:
    assert growth_per_s([TimeStampedValue(0, 100), TimeStampedValue(1, 5)]) == 0
    assert growth_per_s([TimeStampedValue(0, 100)]) == 0
    assert growth_per_s([]) == 0
