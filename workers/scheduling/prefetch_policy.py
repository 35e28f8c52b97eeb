"""Which adapters and pages of KV begin to come for sequences that still wait: a pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_LOADS_UNDER_WAY = 8  # adapters that come into the pool at once: later ones wait for their turn


@dataclass(frozen=True)
class WaitingNeeds:
    """What one waiting sequence needs of the pool to run."""

    adapter: str | None  # digest; None: the base
    is_absent: bool  # the adapter is neither in the pool nor coming
    num_adapter_pages: int  # of an absent or idle adapter; 0: a running sequence has it in use, or it is coming
    num_kv_pages: int  # without those of its prefix that other sequences hold or that are coming


@dataclass(frozen=True)
class PrefetchChoice:
    adapters: tuple[str, ...]  # digests that should begin to come, the oldest sequence's first
    num_with_room: int  # so many of the oldest sequences have room for their KV too, so that it may come


def choose_prefetch(waiting: Iterable[WaitingNeeds], num_pages: int, num_loads: int) -> PrefetchChoice:
    """What should begin to come now, even for sequences that the next step has no place for.

    `waiting`: the oldest sequences, oldest first, as many as a batch can take. A sequence further back does not run
    before a whole batch has ended, so what is idle in the pool may well be used sooner than what it needs.
    `num_pages`: free or idle ones, less those that running sequences will take meanwhile, since pages under a copy
    cannot be given to them. `num_loads`: adapters that may begin to come.

    Each sequence claims what it will need to run, adapter and KV, before anything comes for a newer one. So

    - what comes for a newer sequence is never in the way of an older one, and evicts no adapter of an older one;
    - no more comes than can run together: it would push out what came before, and that would have to come again;
    - an older sequence that lacks room holds up all newer ones, until running sequences have ended and there is enough.
    """
    adapters: list[str] = []
    claimed: set[str] = set()
    num_with_room = 0
    for needs in waiting:
        if needs.adapter is not None and needs.adapter not in claimed:
            if needs.num_adapter_pages > num_pages:
                break
            num_pages -= needs.num_adapter_pages
            claimed.add(needs.adapter)
            if needs.is_absent and len(adapters) < num_loads:
                adapters.append(needs.adapter)
        if needs.num_kv_pages > num_pages:
            break
        num_pages -= needs.num_kv_pages
        num_with_room += 1
    return PrefetchChoice(tuple(adapters), num_with_room)
