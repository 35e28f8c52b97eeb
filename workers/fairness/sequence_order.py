"""Which waiting sequence starts before older ones, and which running sequence is preempted: pure policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..wire.page_keys import PageKey

# Whether a waiting sequence starts before older ones of its tenant, since its prefix is in the pool: pure policies.

_LEAST_PASSED = 1
_PART_PASSED = 0.25
_LEAST_GAIN = 0.5  # of a sequence's tokens


class PrefixHere(NamedTuple):
    """What the pool has of a waiting sequence now, and may not have when its turn comes."""

    num_tokens: int  # of the sequence
    num_found: int  # its first tokens, whose KV is in the pool
    last_key: PageKey | None  # of the last page of these


def most_passed_over(num_before: int) -> int:
    """How many newer sequences of its tenant may start before a sequence that arrives behind `num_before`."""
    return _LEAST_PASSED + int(_PART_PASSED * num_before)


def to_promote(prefixes: Sequence[PrefixHere]) -> int | None:
    """Index of the sequence that should start before the first one; None: the first one should start.

    Only if that saves half of its tokens more than the first one would. Of several it is one of the prefix that the
    fewest of them share: once they have started, its pages can be evicted without loss.
    """
    first = prefixes[0]
    worth = [
        index
        for index, each in enumerate(prefixes)
        if each.num_found - first.num_found >= _LEAST_GAIN * each.num_tokens
    ]
    num_sharing = Counter([prefixes[index].last_key for index in worth])
    return min(worth, key=lambda index: num_sharing[prefixes[index].last_key], default=None)


# Which sequence is preempted, and for which: pure policies.

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
