"""The state of a gang after a step, as its frames tell it: what is now, and what was counted so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec


class EngineGauges(msgspec.Struct, frozen=True, kw_only=True):
    """What is now."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_adapters: int = 0  # of those that wait: their adapter is not there yet
    oldest_waiting_s: float = 0.0  # for how long the oldest sequence without a token has waited for its first one
    num_queued_tokens: int = 0  # still to compute of all running and waiting sequences, as far as they have grown
    num_pages: int = 0
    num_free_pages: int = 0
    num_adapter_pages: int = 0
    num_idle_adapter_pages: int = 0  # of them, those of adapters that no running sequence uses
    num_prefix_pages: int = 0  # full pages of KV that are kept for sequences that begin alike
    num_idle_prefix_pages: int = 0  # of them, those that no running sequence holds
    num_host_pages: int = 0  # of KV, in host memory
    num_disk_pages: int = 0  # of KV, on disk
    host_adapter_bytes: int = 0  # of packed adapters in host memory, of the gang's first worker
    num_resident_adapters: int = 0
    num_coming_adapters: int = 0  # being copied into the pool


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted since the engine's start: none of these ever falls."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_cached_tokens: int = 0  # that were not computed, because their KV was there
    num_prefix_evictions: int = 0  # pages
    num_pages_out: int = 0  # of KV that were copied from the pool to the tier behind it
    num_pages_in: int = 0  # of KV that were copied from a tier behind the pool into it
    num_move_failures: int = 0  # copies between tiers that failed
    num_adapter_reads: int = 0  # of loads, those from the store: the adapter was not in host memory
    num_loaded_pages: int = 0  # of adapters whose load succeeded
    busy_s: float = 0.0  # inside steps
    loading_s: float = 0.0  # until adapters were there, summed over them


class EngineLoad(msgspec.Struct, frozen=True):
    gauges: EngineGauges = EngineGauges()
    counters: EngineCounters = EngineCounters()

    def flat(self) -> dict[str, int | float]:
        """All values by their names, as /status shows them."""
        return {**msgspec.structs.asdict(self.gauges), **msgspec.structs.asdict(self.counters)}


def summed(loads: Sequence[EngineLoad]) -> EngineLoad:
    """The load of several gangs together; the oldest wait is the oldest of all. At least one load is needed."""
    gauges = _summed([load.gauges for load in loads])
    oldest_s = max(load.gauges.oldest_waiting_s for load in loads)
    return EngineLoad(
        msgspec.structs.replace(gauges, oldest_waiting_s=oldest_s), _summed([load.counters for load in loads])
    )


_Values = TypeVar("_Values", EngineGauges, EngineCounters)


def _summed(parts: Sequence[_Values]) -> _Values:
    names = [field.name for field in msgspec.structs.fields(parts[0])]
    return type(parts[0])(**{name: sum(getattr(part, name) for part in parts) for name in names})
