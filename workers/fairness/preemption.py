"""Which sequence is preempted, and for which: pure policies."""

from __future__ import annotations

# Whether it is background work, its tenant's counter, its position in its tenant's order. The least goes first.
Rank = tuple[bool, float, int]


def may_grow_over(last: Rank, needy: Rank) -> bool:
    """Whether the last running sequence by rank is preempted for a running one that needs pages.

    Background work is preempted first, then sequences of the tenant that is furthest ahead, then the newest. Ranks are
    one order, so the first sequence is never preempted, and all are served in the end.
    """
    return last > needy


def should_preempt(running: Rank, waiting: Rank, slack: float) -> bool:
    """Whether a running sequence is preempted for one that waits.

    Only if the waiting one's tenant is behind by more than `slack`, or the running one is background work: otherwise
    the waiting one, of the same or an about equal tenant, waits until another sequence ends. `slack` is what several
    steps of the waiting tenant's own work add to its counter, so two tenants change places rarely, whatever their
    weights.
    """
    return (running[0], running[1] - slack) > waiting[:2]
