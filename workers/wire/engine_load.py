"""The state of a gang after a step, as its frames have it: what is now, and what was counted so far.

A field's description is its text in `/metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

# Messages of gang and routers about how much service each tenant has had.


class TenantShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a tenant is at one gang. All but the counter is of this moment.

    `counter`: the tenant's virtual time there: the tokens' worth that the gang has served it, by its prices, divided by
    the tenant's weight, and lifted as it came back. The tenant with the least goes first.
    """

    tenant: str
    counter: float
    num_running: int
    num_waiting: int
    num_waiting_tokens: int  # of prompts (and of answers that another gang began) of its sequences that wait
    num_running_tokens: int = 0  # still to compute of its sequences that run
    weight: float = 1.0  # that its sequences have come with, the latest
    served: float = 0.0  # of the counter, what this gang has served it: without lifts, nor what other gangs served


class ServedElsewhere(msgspec.Struct, frozen=True, tag="served"):
    """What tenants have had at all other gangs, as this router knows it: sent again as it grows.

    `totals`: a tenant and what it had, in tokens' worth divided by its weight, since those gangs were started: the same
    whichever router sends it, and it never shrinks. A leader charges what the largest total of all its routers has
    grown by, so several routers that send the same do not count it twice.
    """

    totals: list[tuple[str, float]]


class EngineGauges(msgspec.Struct, frozen=True, kw_only=True):
    """What is now."""

    num_running: Annotated[int, Meta(description="Sequences that run.")] = 0
    num_waiting: Annotated[int, Meta(description="Sequences that wait for their turn.")] = 0
    num_waiting_for_adapters: Annotated[
        int, Meta(description="Of the sequences that wait, those whose adapter is not there yet.")
    ] = 0
    oldest_waiting_s: Annotated[
        float, Meta(description="Seconds that the oldest sequence without a token has waited for its first one.")
    ] = 0.0
    num_queued_tokens: Annotated[
        int,
        Meta(description="Tokens still to compute of all running and waiting sequences, as far as they have grown."),
    ] = 0
    num_running_background: Annotated[
        int, Meta(description="Of the sequences that run, those of background work, which yields to all other.")
    ] = 0
    num_queued_background_tokens: Annotated[
        int, Meta(description="Of the tokens still to compute, those of background sequences that wait.")
    ] = 0
    num_pages: Annotated[int, Meta(description="Pages of the pool.")] = 0
    num_free_pages: Annotated[int, Meta(description="Pages of the pool that are free.")] = 0
    num_adapter_pages: Annotated[int, Meta(description="Pages of the pool that adapters take.")] = 0
    num_idle_adapter_pages: Annotated[
        int, Meta(description="Of the pages of adapters, those of adapters that no running sequence uses.")
    ] = 0
    num_prefix_pages: Annotated[
        int, Meta(description="Full pages of KV that are kept for sequences that begin alike.")
    ] = 0
    num_idle_prefix_pages: Annotated[
        int, Meta(description="Of the kept pages of KV, those that no running sequence holds.")
    ] = 0
    num_host_pages: Annotated[int, Meta(description="Pages of KV in host memory.")] = 0
    num_disk_pages: Annotated[int, Meta(description="Pages of KV on disk.")] = 0
    host_adapter_bytes: Annotated[
        int, Meta(description="Bytes of packed adapters in host memory, of each gang's first worker.")
    ] = 0
    num_resident_adapters: Annotated[int, Meta(description="Adapters that are in the pool.")] = 0
    num_coming_adapters: Annotated[int, Meta(description="Adapters that are being copied into the pool.")] = 0
    num_hung_reads: Annotated[
        int, Meta(description="Reads of adapters from the store that passed their deadline and have not come back.")
    ] = 0


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted since the engine's start: none of these ever falls."""

    num_steps: Annotated[int, Meta(description="Steps that were computed.")] = 0
    num_computed_tokens: Annotated[int, Meta(description="Tokens of prompts and answers that were computed.")] = 0
    num_generated_tokens: Annotated[int, Meta(description="Tokens that the gangs generated.")] = 0
    num_recomputed_tokens: Annotated[
        int,
        Meta(
            description="Of the computed tokens, those that had been computed before, or whose results were dropped; "
            "counted when a sequence stops running."
        ),
    ] = 0
    num_preemptions: Annotated[
        int, Meta(description="Sequences that gave their pages to others and are computed again.")
    ] = 0
    num_fair_preemptions: Annotated[
        int,
        Meta(description="Of the preempted sequences, those that gave way to waiting ones of tenants who had less."),
    ] = 0
    num_late_masks: Annotated[
        int, Meta(description="Tokens that a step did not choose, because their grammar's mask was not made yet.")
    ] = 0
    num_adapter_loads: Annotated[int, Meta(description="Adapters that were loaded into the pool.")] = 0
    num_adapter_evictions: Annotated[int, Meta(description="Adapters that were evicted from the pool.")] = 0
    num_cached_tokens: Annotated[
        int, Meta(description="Tokens that were not computed, because their KV was there.")
    ] = 0
    num_prefix_evictions: Annotated[int, Meta(description="Kept pages of KV that were evicted from the pool.")] = 0
    num_pages_out: Annotated[
        int, Meta(description="Pages of KV that were copied from the pool to the tier behind it.")
    ] = 0
    num_pages_in: Annotated[
        int, Meta(description="Pages of KV that were copied from a tier behind the pool into it.")
    ] = 0
    num_move_failures: Annotated[int, Meta(description="Copies between tiers that failed.")] = 0
    num_adapter_reads: Annotated[
        int,
        Meta(description="Of the adapters that were loaded, those read from the store: host memory did not have them."),
    ] = 0
    num_loaded_pages: Annotated[int, Meta(description="Pages of adapters whose load succeeded.")] = 0
    num_failed_reads: Annotated[
        int, Meta(description="Reads of adapters from the store that failed, those included that were tried again.")
    ] = 0
    busy_s: Annotated[float, Meta(description="Seconds spent in steps.")] = 0.0
    loading_s: Annotated[float, Meta(description="Seconds until adapters were there, summed over adapters.")] = 0.0


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
