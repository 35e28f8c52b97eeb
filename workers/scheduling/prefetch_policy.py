"""Which adapters and pages of KV are loaded for sequences that still wait: a pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_LOADS_UNDER_WAY = 8  # adapters that are loaded into the pool at once, from host memory and from the store each


@dataclass(frozen=True)
class FreeLoads:
    """Loads that may begin, by where the adapter is: reads of a store that hangs must not stop the others."""

    from_host: int
    from_store: int


def free_loads(num_loading: int, num_loading_from_store: int) -> FreeLoads:
    """`num_loading`: loads under way, those from the store included."""
    num_from_host = num_loading - num_loading_from_store
    return FreeLoads(MAX_LOADS_UNDER_WAY - num_from_host, MAX_LOADS_UNDER_WAY - num_loading_from_store)


@dataclass(frozen=True)
class WaitingNeeds:
    """Pages and adapter that one waiting sequence needs."""

    adapter: str | None  # digest; None: the base
    is_absent: bool  # the adapter is neither in the pool nor being loaded
    num_adapter_pages: int  # of an absent or idle adapter; 0: it is in use or being loaded
    num_kv_pages: int  # without those of its prefix that other sequences hold or that are coming
    is_hosted: bool = False  # an absent adapter is in host memory


@dataclass(frozen=True)
class PrefetchChoice:
    adapters: tuple[str, ...]  # digests to load, the oldest sequence's first
    num_with_room: int  # number of the oldest sequences that have room for their KV too


def choose_prefetch(waiting: Iterable[WaitingNeeds], num_pages: int, loads: FreeLoads) -> PrefetchChoice:
    """What to load now, even for sequences that the next step cannot start.

    `waiting`: the oldest sequences, oldest first, as many as a batch can take. A sequence further back does not run
    before a whole batch has ended, so what is idle in the pool may well be used sooner than what it needs.
    `num_pages`: free or idle ones, less those that running sequences will take meanwhile.

    Each sequence claims the pages that it will need, adapter and KV, before anything is loaded for a newer one. So

    - a load for a newer sequence never takes room from an older one, or evicts its adapter;
    - no more is loaded than can run together, since it would evict what was loaded before;
    - an older sequence that lacks room blocks all newer ones until running sequences have ended.
    """
    adapters: list[str] = []
    claimed: set[str] = set()
    num_begun = {True: 0, False: 0}  # by whether the adapter is in host memory
    num_with_room = 0
    for needs in waiting:
        if needs.adapter is not None and needs.adapter not in claimed:
            if needs.num_adapter_pages > num_pages:
                break
            num_pages -= needs.num_adapter_pages
            claimed.add(needs.adapter)
            most = loads.from_host if needs.is_hosted else loads.from_store
            if needs.is_absent and num_begun[needs.is_hosted] < most:
                num_begun[needs.is_hosted] += 1
                adapters.append(needs.adapter)
        if needs.num_kv_pages > num_pages:
            break
        num_pages -= needs.num_kv_pages
        num_with_room += 1
    return PrefetchChoice(tuple(adapters), num_with_room)
