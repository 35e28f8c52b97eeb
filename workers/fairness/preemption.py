"""Which sequence is preempted, and for whom: pure policies."""

from __future__ import annotations

from typing import Protocol, TypeVar

# Whether it is background work, its tenant's band, and its place in its tenant's order: the least goes first.
Rank = tuple[bool, int, int]


class Ranked(Protocol):
    @property
    def rank(self) -> Rank: ...


_Sequence = TypeVar("_Sequence", bound=Ranked)


def choose_victim(last: _Sequence | None, needy: Ranked) -> _Sequence | None:
    """Who gives pages to a running sequence: the last running one by rank, if it comes after; None: nobody does.

    Background work goes first, then whose tenant is furthest ahead, then the newest. Since ranks are one order, whoever
    is first is never preempted, so it always goes on, and all are served in the end.
    """
    return last if last is not None and last.rank > needy.rank else None


def gives_place(last: Ranked, waiting: Rank) -> bool:
    """Whether the last running sequence by rank gives its place and its pages to one that waits.

    Only if the tenant of that one is clearly behind, or if the one that runs is background work: sequences of tenants
    who are about equal, and those of one tenant, wait until others end.
    """
    return last.rank[:2] > waiting[:2]
