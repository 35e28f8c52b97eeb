"""The scaling policy as Ray Serve's controller runs it, ten times a second.

Serve wraps a policy in delays, factors and averages of its own, which are set here to have no effect. Two functions of
the wrapper are used: it enforces the bounds, and while no replica runs, a call that waits at a handle starts the first
replica without asking the policy (`GangDemand` makes such calls).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from heapq import nlargest
from typing import Any, Protocol

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from ...workers.wire.engine_load import EngineLoad, TenantShare
from ..application.application_config import values_of
from ..config import scaling_of
from ..scaling import FleetState, GangLoad, ScalingConfig, ScalingHistory, TenantLoad, decide
from ..settings.setting_field import SettingField
from ..settings.settings import Settings

# The numbers that a gang's replica reports to the autoscaler, and how the autoscaler reads them.
#
# Ray Serve asks each replica a few times in a window for numbers with names. The policy gets them as time series.

# Gauges: their mean over the window counts.
NUM_SEQUENCES = "num_sequences"
QUEUED_TOKENS = "queued_tokens"
POOL_PRESSURE = "pool_pressure"
# Counters: their growth over the window counts.
ADAPTER_LOADS = "adapter_loads"
ADAPTER_EVICTIONS = "adapter_evictions"
COMPUTED_TOKENS = "computed_tokens"
# Gauges of one tenant: its name follows.
BACKGROUND_SHARE = "background_share"  # a gauge: the share of background work in what runs
TENANT_TOKENS = "tenant_tokens/"
TENANT_PRESSURE = "tenant_pressure/"
_MAX_TENANTS = 8  # reported ones, with the largest backlogs, since only a few tenants can flood a gang


class Sample(Protocol):
    """One sample of a series, as Serve stores it."""

    @property
    def timestamp(self) -> float: ...
    @property
    def value(self) -> float: ...


def gang_stats(load: EngineLoad, max_num_sequences: int, shares: Iterable[TenantShare] = ()) -> dict[str, float]:
    """The numbers to report. The pressure is that of pages or of places for sequences, whichever is higher.

    Background work does not cause another gang, as it uses what others leave: its queue is not reported, and its
    part of the pressure neither. `shares`: of the tenants that have sequences there. A tenant's part of the pressure is
    its part of what runs, as that of background work is.
    """
    now, counted = load.gauges, load.counters
    num_evictable_pages = now.num_idle_adapter_pages + now.num_idle_prefix_pages
    num_used_pages = now.num_pages - now.num_free_pages - num_evictable_pages
    background_share = now.num_running_background / max(now.num_running, 1)
    pressure = max(num_used_pages / max(now.num_pages, 1), now.num_running / max_num_sequences)
    stats = {
        NUM_SEQUENCES: now.num_running + now.num_waiting,
        # The next token of a running sequence does not wait.
        QUEUED_TOKENS: max(0, now.num_queued_tokens - now.num_queued_background_tokens - now.num_running),
        POOL_PRESSURE: pressure * (1 - background_share),
        BACKGROUND_SHARE: background_share,
        ADAPTER_LOADS: counted.num_adapter_loads,
        ADAPTER_EVICTIONS: counted.num_adapter_evictions,
        COMPUTED_TOKENS: counted.num_computed_tokens,
    }
    for share in nlargest(_MAX_TENANTS, shares, key=lambda share: (share.num_waiting_tokens, share.num_running)):
        # The next token of a running sequence does not wait.
        num_tokens = share.num_waiting_tokens + max(0, share.num_running_tokens - share.num_running)
        stats[TENANT_TOKENS + share.tenant] = num_tokens
        stats[TENANT_PRESSURE + share.tenant] = pressure * share.num_running / max(now.num_running, 1)
    return stats


def gang_load(means: Mapping[str, float], series: Mapping[str, Sequence[Sample]]) -> GangLoad:
    """One gang's load from the means and the series of its numbers.

    Only those loads of adapters count that pushed another adapter out. Loads into an empty pool end by themselves, and
    more gangs would bring more empty pools.
    """
    loads_per_s = min(growth_per_s(series.get(ADAPTER_LOADS, ())), growth_per_s(series.get(ADAPTER_EVICTIONS, ())))
    return GangLoad(
        num_sequences=means.get(NUM_SEQUENCES, 0.0),
        queued_tokens=means.get(QUEUED_TOKENS, 0.0),
        pool_pressure=means.get(POOL_PRESSURE, 0.0),
        adapter_loads_per_s=loads_per_s,
        computed_tokens_per_s=growth_per_s(series.get(COMPUTED_TOKENS, ())) * (1 - means.get(BACKGROUND_SHARE, 0.0)),
        tenants=tuple(
            TenantLoad(tenant, tokens, means.get(TENANT_PRESSURE + tenant, 0.0))
            for name, tokens in means.items()
            if (tenant := name.removeprefix(TENANT_TOKENS)) != name
        ),
    )


def growth_per_s(series: Sequence[Sample]) -> float:
    """The rate of a counter from the first to the last sample; 0 with fewer than two."""
    if len(series) < 2 or series[-1].timestamp <= series[0].timestamp:
        return 0.0
    return max(0.0, series[-1].value - series[0].value) / (series[-1].timestamp - series[0].timestamp)


POLICY_SETTINGS = (
    "queued_tokens_per_gang",
    "max_tokens_per_step",  # the default of the former
    "pool_pressure",
    "scale_down_after_s",
    "scale_to_zero_after_s",
    "tenant_scaling_share",
    "scaling_window_s",
    "cold_start_wait_s",
)
HISTORY = "history"  # key in the state that Serve keeps for the policy
SAMPLES_PER_WINDOW = 5


class GangAutoscaler:
    """Serve creates one and calls it with a context, which also carries its state.

    A configuration of Serve may name it as the policy of its own `autoscaling_config`.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, **config: Any) -> None:
        """`settings`: by their keys, as in an application's args. `config`: fields of ScalingConfig, since Serve passes
        arguments as JSON. Values that neither gives have the settings' defaults. Raises ConfigError for other keys.

        The bounds of the number of gangs come with each call: Serve changes them while the policy runs.
        """
        values = values_of(settings or {}, "settings of the policy", _why_not)
        self._config = replace(scaling_of(Settings().replaced(**values)), **config)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        # Monotonic: the context's time would jump with the machine's clock.
        state = fleet_state(context, time.monotonic())
        config = replace(
            self._config,
            min_gangs=context.capacity_adjusted_min_replicas,
            max_gangs=max(1, context.capacity_adjusted_max_replicas),
        )
        history = context.policy_state.get(HISTORY)
        if history is None or len(history.last_needed_s) != config.max_gangs:
            history = ScalingHistory.start(state, config)
        history = history.observe(state, config)
        return decide(state, config, history), {HISTORY: history}


def _why_not(field: SettingField) -> str | None:
    return None if field.name in POLICY_SETTINGS else "the policy does not read it: set it in args"


def fleet_state(context: AutoscalingContext, now_s: float) -> FleetState:
    """The fleet's state, from Serve's context."""
    means: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    series: Mapping[str, Mapping[Any, Any]] = context.raw_metrics or {}
    reported = [replica for replica in context.running_replicas if replica in means.get(NUM_SEQUENCES, {})]
    return FleetState(
        now_s=now_s,
        target=context.target_num_replicas,
        num_running=context.current_num_replicas,
        gangs=tuple(gang_load(_of(replica, means), _of(replica, series)) for replica in reported),
        is_awaited=context.total_queued_requests > 0,
    )


def autoscaling_config(scaling: ScalingConfig, *, is_update: bool = False) -> AutoscalingConfig:
    """Serve's options for scaling the gangs' deployment.

    A new deployment starts with at least one gang, so that a model that cannot be loaded fails at once. `is_update`:
    the deployment runs already and keeps its number of gangs; else Serve would reset it to the initial number.
    """
    with warnings.catch_warnings():
        # Ray 2.60 calls the interval deprecated in favour of variables that it does not read for replicas yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=scaling.min_gangs,
            max_replicas=scaling.max_gangs,
            initial_replicas=None if is_update else max(1, scaling.min_gangs),
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            look_back_period_s=scaling.window_s,
            metrics_interval_s=scaling.window_s / SAMPLES_PER_WINDOW,
            policy=AutoscalingPolicy(policy_function=GangAutoscaler, policy_kwargs=asdict(scaling)),
        )


def _of(replica: Any, by_name: Mapping[str, Mapping[Any, Any]]) -> dict[str, Any]:
    """The values of one replica by name."""
    return {name: values[replica] for name, values in by_name.items() if replica in values}
