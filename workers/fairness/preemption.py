"""Which sequence is preempted, and for which: pure policies."""

from __future__ import annotations

from typing import Protocol, TypeVar

# Whether it is background work, its tenant's band, its position in its tenant's order. The least goes first.
Rank = tuple[bool, int, int]


class Ranked(Protocol):
    @property
    def rank(self) -> Rank: ...


_Sequence = TypeVar("_Sequence", bound=Ranked)


def choose_victim(last: _Sequence | None, needy: Ranked) -> _Sequence | None:
    """The sequence to preempt for a running one that needs pages: the last by rank, if it ranks after; else None.

    Background work is preempted first, then sequences of the tenant that is furthest ahead, then the newest. Ranks are
    one order, so the first sequence is never preempted, and all are served in the end.
    """
    return last if last is not None and last.rank > needy.rank else None


def should_preempt(last: Ranked, waiting: Rank) -> bool:
    """Whether the last running sequence by rank is preempted for one that waits.

    Only if the waiting one's tenant is clearly behind, or the running one is background work: otherwise the waiting
    one, of the same or an about equal tenant, waits until another sequence ends.
    """
    return last.rank[:2] > waiting[:2]
