"""A gang's load, as its scheduler reports it."""

from __future__ import annotations

from dataclasses import dataclass

from ..fairness.tenant_counters import TenantCounter
from ..memory.paged_memory import PagedMemory
from ..plan import HostAdapterStats
from ..wire.engine_load import EngineCounters, EngineGauges, EngineLoad, TenantShare
from .prefix_reuse import PrefixReuse
from .running_sequences import RunningSequences
from .tier_traffic import TierTraffic
from .waiting_queue import WaitingQueue


@dataclass
class StepCounts:
    """The scheduler's counts since its start."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0  # of sequences whose runs have ended
    num_preemptions: int = 0
    num_fair_preemptions: int = 0  # of these, for sequences that waited
    num_late_masks: int = 0


def gang_load(
    counts: StepCounts,
    waiting: WaitingQueue,
    running: RunningSequences,
    memory: PagedMemory,
    tiers: TierTraffic,
    prefixes: PrefixReuse,
    host_adapters: HostAdapterStats,
    num_pages: int,
    num_compiling: int,
) -> EngineLoad:
    """Gauges of now and counters since the start.

    `num_pages`: of the pool. `num_compiling`: sequences that wait for their grammars.
    """
    adapters = memory.adapters
    gauges = EngineGauges(
        num_running=len(running),
        num_waiting=len(waiting) + num_compiling,
        num_waiting_for_adapters=waiting.num_lacking,
        num_queued_tokens=running.num_uncomputed + waiting.num_tokens,
        num_running_background=running.num_background,
        num_queued_background_tokens=waiting.num_background_tokens,
        num_pages=num_pages,
        num_free_pages=memory.allocator.num_free,
        num_adapter_pages=adapters.num_pages,
        num_idle_adapter_pages=adapters.num_idle_pages,
        num_prefix_pages=memory.prefixes.num_pages,
        num_idle_prefix_pages=memory.num_idle_prefix_pages,
        num_host_pages=tiers.num_held("host"),
        num_disk_pages=tiers.num_held("disk"),
        host_adapter_bytes=host_adapters.num_bytes,
        num_resident_adapters=adapters.num_resident,
        num_coming_adapters=adapters.num_loading,
        num_hung_reads=host_adapters.num_hung_reads,
    )
    counters = EngineCounters(
        num_steps=counts.num_steps,
        num_computed_tokens=counts.num_computed_tokens,
        num_generated_tokens=counts.num_generated_tokens,
        num_recomputed_tokens=counts.num_recomputed_tokens,
        num_preemptions=counts.num_preemptions,
        num_fair_preemptions=counts.num_fair_preemptions,
        num_late_masks=counts.num_late_masks,
        num_adapter_loads=adapters.num_loads,
        num_adapter_evictions=adapters.num_evictions,
        num_cached_tokens=prefixes.num_cached_tokens,
        num_prefix_evictions=memory.prefixes.num_evictions,
        num_pages_out=tiers.num_pages_out,
        num_pages_in=tiers.num_pages_in,
        num_move_failures=tiers.num_failures,
        num_adapter_reads=host_adapters.num_reads,
        num_loaded_pages=adapters.num_loaded_pages,
        num_failed_reads=host_adapters.num_failed_reads,
    )
    return EngineLoad(gauges, counters)


def tenant_share(counter: TenantCounter, waiting: WaitingQueue, running: RunningSequences) -> TenantShare:
    """A tenant's service in one class, and its sequences there."""
    sequences = running.by_tenant.get(counter, ())
    num_waiting, num_waiting_tokens = waiting.of_tenant(counter)
    return TenantShare(
        counter.tenant,
        counter.value * counter.weight / counter.given_weight,
        len(sequences),
        num_waiting,
        num_waiting_tokens,
        sum([sequence.num_uncomputed for sequence in sequences]),
        counter.given_weight,
        counter.served,
    )
