"""The numbers that a gang's replica reports to the autoscaler, and how the autoscaler reads them.

Ray Serve asks each replica a few times in a window for numbers with names. The policy gets them as time series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Protocol

from ...workers.wire.engine_load import EngineLoad
from ...workers.wire.fair_shares import TenantShare
from ..scaling import GangLoad, TenantLoad

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
