"""What begins to come for sequences that still wait: a pure policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_LOADS_UNDER_WAY = 8  # adapters that come into the pool at once: later ones wait for their turn


@dataclass(frozen=True)
class Waiter:
    """A waiting sequence, as far as room in the pool is concerned."""

    adapter: str | None  # digest; None: the base
    is_absent: bool  # its adapter is neither in the pool nor coming
    num_adapter_pages: int  # that its adapter takes, or keeps though it is idle; 0: they are in other hands already
    num_kv_pages: int  # that it takes when it enters, beside those that somebody else holds or brings


@dataclass(frozen=True)
class Prefetch:
    adapters: tuple[str, ...]  # digests that should begin to come, of the oldest waiter first
    num_with_room: int  # of the oldest waiters: those for whose KV there is room too, so that it may come


def choose_prefetch(waiters: Iterable[Waiter], num_pages: int, num_loads: int) -> Prefetch:
    """What should begin to come now, whether or not the next batch has a place for whom it is for.

    `waiters`: oldest first, as many as a batch can take. Who is further back does not run before a whole batch has
    ended, so what is idle in the pool may well be used sooner. `num_pages`: free or idle, less what running sequences
    will take meanwhile, for pages under a copy cannot be given to them. `num_loads`: that may begin.

    Each waiter claims what it will need to run, adapter and KV, before anything comes for a newer one. So

    - nothing that comes for a newer one is in the way of an older one, and no adapter of an older one has to go for it;
    - no more comes than can run together: it would push out what came before, and that would have to come again;
    - an older one that lacks room holds up all newer ones, until running sequences have ended and there is enough.
    """
    adapters: list[str] = []
    claimed: set[str] = set()
    num_with_room = 0
    for waiter in waiters:
        if waiter.adapter is not None and waiter.adapter not in claimed:
            if waiter.num_adapter_pages > num_pages:
                break
            num_pages -= waiter.num_adapter_pages
            claimed.add(waiter.adapter)
            if waiter.is_absent and len(adapters) < num_loads:
                adapters.append(waiter.adapter)
        if waiter.num_kv_pages > num_pages:
            break
        num_pages -= waiter.num_kv_pages
        num_with_room += 1
    return Prefetch(tuple(adapters), num_with_room)
