"""The scaling policy as Ray Serve's controller runs it, ten times a second.

Serve wraps a policy in delays, factors and averages of its own, which are set here to have no effect. Two functions of
the wrapper are used: it enforces the bounds, and while no replica runs, a call that waits at a handle starts the first
replica without asking the policy (`GangDemand` makes such calls).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from ..application.setting_keys import values_of
from ..config import scaling_of
from ..scaling import FleetState, ScalingConfig, ScalingHistory, decide
from ..settings.setting_field import SettingField
from ..settings.settings import Settings
from .gang_stats import NUM_SEQUENCES, gang_load

POLICY_SETTINGS = (
    "queued_tokens_per_gang",
    "max_tokens_per_step",  # the default of the former
    "pool_pressure",
    "adapter_loads_per_s",
    "scale_down_share",
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
