"""The autoscaling policy: a pure function of the fleet's load, the settings, and what was needed before.

Loads are summed over the fleet, so the number of gangs needed does not depend on how many there are: a gang that is
starting does not cause another start. Scaling up happens at once. Scaling down happens only after the load has been
small enough for a while; `ScalingHistory` records for how long.

One tenant's backlog can call for no more than a share of the maximal number of gangs, whatever it sends: fair
scheduling makes the rest of it wait. Gangs that other tenants need are added to these, so a longer backlog of one
tenant never means fewer gangs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """Bounds, what one gang should carry, and how long to wait. Defaults: `cluster/settings/gang_settings.py`."""

    min_gangs: int  # 0: none without requests
    max_gangs: int
    queued_tokens_per_gang: int  # tokens of prompts that wait to be computed
    pool_pressure: float  # share of a gang's pages, or of its places for running sequences, in use
    adapter_loads_per_s: float = 4.0  # of each gang, into a full pool, so that each evicts another adapter
    scale_down_share: float = 0.7  # fewer gangs are enough if the load fits into this share of their three limits above
    scale_down_after_s: float  # for which fewer gangs must have been enough
    scale_to_zero_after_s: float  # time without requests
    start_grace_s: float  # for which a starting gang counts as needed
    window_s: float  # over which a load is averaged
    tenant_scaling_share: float  # of max_gangs, at most, for one tenant's backlog

    def __post_init__(self) -> None:
        if self.min_gangs > self.max_gangs:
            raise ValueError(
                f"min_gangs = {self.min_gangs!r}: at most max_gangs, which is {self.max_gangs}, is accepted"
            )
        if not self.scale_to_zero_after_s >= 2 * self.window_s:
            # With less, the windows would still hold the last request and bring the gang back.
            requirement = f"at least two scaling windows, which are {2 * self.window_s:g} s, are needed"
            raise ValueError(f"scale_to_zero_after_s = {self.scale_to_zero_after_s!r}: {requirement}")

    @property
    def is_fixed(self) -> bool:
        """Whether the number of gangs never changes."""
        return self.min_gangs == self.max_gangs


@dataclass(frozen=True)
class TenantLoad:
    """One tenant's part of a gang's load, in the same measures."""

    tenant: str
    queued_tokens: float = 0.0
    pool_pressure: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GangLoad:
    """One gang over the last window."""

    num_sequences: float = 0.0  # running and waiting
    queued_tokens: float = 0.0
    pool_pressure: float = 0.0  # 0 to 1
    adapter_loads_per_s: float = 0.0  # into a full pool
    computed_tokens_per_s: float = 0.0
    tenants: tuple[TenantLoad, ...] = ()  # those with the largest backlogs; others are not reported

    @property
    def is_idle(self) -> bool:
        return not (self.num_sequences or self.queued_tokens or self.computed_tokens_per_s)


@dataclass(frozen=True, kw_only=True)
class FleetState:
    now_s: float
    target: int  # gangs that Serve was last asked for
    num_running: int  # gangs that serve
    gangs: tuple[GangLoad, ...] = ()  # running gangs that have reported a load
    is_awaited: bool = False  # a request waits because no gang runs


@dataclass(frozen=True)
class Saturation:
    """How many tokens a second one gang computed while its queue was too long."""

    tokens_per_s: float
    at_s: float


@dataclass(frozen=True)
class ScalingHistory:
    """What a decision needs from the past."""

    last_needed_s: tuple[float, ...]  # entry k - 1: when at least k gangs were last needed
    target: int
    raised_s: float  # when the target last grew
    saturation: Saturation | None = None

    @classmethod
    def start(cls, state: FleetState, config: ScalingConfig) -> ScalingHistory:
        """An empty history: all requested gangs count as needed now."""
        last_needed_s = _mark((-math.inf,) * config.max_gangs, state.target, state.now_s)
        return cls(last_needed_s, state.target, state.now_s)

    def observe(self, state: FleetState, config: ScalingConfig) -> ScalingHistory:
        """This history with one more state."""
        saturation = _observe_saturation(self.saturation, state, config)
        raised_s = state.now_s if state.target > self.target else self.raised_s
        needed = gangs_needed(state, config, config.scale_down_share)
        if saturation is not None:
            rate = sum(gang.computed_tokens_per_s for gang in state.gangs)
            num_gangs = rate / (saturation.tokens_per_s * config.scale_down_share)
            needed = max(needed, math.ceil(min(num_gangs, config.max_gangs)))
        is_starting = state.num_running < state.target and state.now_s - raised_s < config.start_grace_s
        if is_starting or not state.gangs or len(state.gangs) < state.num_running:
            needed = max(needed, state.target)  # a gang that has reported nothing yet may be needed
        return ScalingHistory(_mark(self.last_needed_s, needed, state.now_s), state.target, raised_s, saturation)

    def gangs_to_keep(self, now_s: float, config: ScalingConfig) -> int:
        """The number of gangs that must stay because they were needed not long ago."""
        delays_s = (config.scale_to_zero_after_s, *(config.scale_down_after_s,) * (len(self.last_needed_s) - 1))
        num_gangs = 0
        for count, (at_s, delay_s) in enumerate(zip(self.last_needed_s, delays_s, strict=True), start=1):
            if now_s - at_s <= delay_s:
                num_gangs = count
        return num_gangs


def gangs_needed(state: FleetState, config: ScalingConfig, share: float = 1.0) -> int:
    """How many gangs the load needs if each is filled to `share` of its limits, at most `max_gangs`.

    0: no sequences.
    """
    if not state.is_awaited and all(gang.is_idle for gang in state.gangs):
        return 0
    tenants = [tenant_load for gang in state.gangs for tenant_load in gang.tenants]
    tenant_limit = config.tenant_scaling_share * config.max_gangs
    num_gangs = max(
        _called_for(
            sum(gang.queued_tokens for gang in state.gangs) / config.queued_tokens_per_gang,
            [
                (tenant_load.tenant, tenant_load.queued_tokens / config.queued_tokens_per_gang)
                for tenant_load in tenants
            ],
            tenant_limit,
        ),
        _called_for(
            sum(gang.pool_pressure for gang in state.gangs) / config.pool_pressure,
            [(tenant_load.tenant, tenant_load.pool_pressure / config.pool_pressure) for tenant_load in tenants],
            tenant_limit,
        ),
        sum(gang.adapter_loads_per_s for gang in state.gangs) / config.adapter_loads_per_s,
    )
    return max(1, math.ceil(min(num_gangs / share, config.max_gangs)))


def _called_for(num_gangs: float, parts: Iterable[tuple[str, float]], tenant_limit: float) -> float:
    """`num_gangs`, where each tenant's parts together count as `tenant_limit` at most."""
    of_tenant: defaultdict[str, float] = defaultdict(float)
    for tenant, part in parts:
        of_tenant[tenant] += part
    # Rounded, since what is left of a sum of parts is not exactly nothing.
    return max(0.0, round(num_gangs - sum(max(0.0, part - tenant_limit) for part in of_tenant.values()), 9))


def decide(state: FleetState, config: ScalingConfig, history: ScalingHistory) -> int:
    """The number of gangs to ask for now. `history` has observed everything up to and including this state.

    Never 0 while there are requests, nor before a gang that was requested has reported its load.
    """
    floor = min(state.target, history.gangs_to_keep(state.now_s, config))
    return min(max(gangs_needed(state, config), floor, config.min_gangs), config.max_gangs)


def _observe_saturation(before: Saturation | None, state: FleetState, config: ScalingConfig) -> Saturation | None:
    """The highest rate of a gang with too long a queue in the last `scale_down_after_s`: the capacity of a gang.

    Once there are enough gangs the queue is empty, and does not show whether fewer would do. This rate does.
    """
    rates = [gang.computed_tokens_per_s for gang in state.gangs if gang.queued_tokens >= config.queued_tokens_per_gang]
    rate = max(rates, default=0.0)
    is_stale = before is None or state.now_s - before.at_s > config.scale_down_after_s
    if rate >= 1.0 and (is_stale or before is None or rate >= before.tokens_per_s):
        return Saturation(rate, state.now_s)
    return before


def _mark(last_needed_s: tuple[float, ...], needed: int, now_s: float) -> tuple[float, ...]:
    return (now_s,) * min(needed, len(last_needed_s)) + last_needed_s[needed:]
