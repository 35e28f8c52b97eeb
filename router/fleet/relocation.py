"""Which waiting sequences move to another gang: a pure policy of what a router knows at that moment.

A sequence is routed when it comes. Later a gang may be added, or work off its queue sooner than was expected, while the
sequence waits elsewhere. So the newest of those that wait in a queue move to a gang that would begin them sooner: the
others of their tenant have waited longer, and one that leaves from the end delays no other. What a sequence has
before it, where it is and elsewhere, is what comes before its tenant's last in the gang's fair order.

A move must be worth it: the sequence has to gain more than the load of its adapter and the kept beginning of its prompt
cost at the other gang, and a least time that doubles with each of its moves. A gang is not believed to be faster than
the one that the sequence leaves. What is known of a new one is a belief, and one that is faster will show it by its
empty queue. So what has moved gains nothing by moving back, unless queues change by more than that.

Several routers move sequences at the same time without talking. Each decides as if all of them decided alike, and moves
its own share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .affinity import GangCosts

# Tokens before the turn of a tenant's sequence. The arguments: tenant, its weight, additional tokens of the tenant, and
# of all tenants; negative: tokens that have left.
TokensBefore = Callable[[str, float, int, int], float]


@dataclass(frozen=True)
class RelocationConfig:
    """How much may move in one round, and what for."""

    least_gain_s: float = 0.25  # for the first move of a sequence
    max_sequences: int = 128  # that move in one round
    max_tokens: int = 1 << 16  # of their prompts; one sequence may always move
    max_examined: int = 512  # sequences of all gangs where some wait, the newest of each
    max_targets: int = 8  # gangs that are examined, those with the shortest queues


@dataclass(frozen=True)
class WaitingSequence:
    """One of this router's sequences that has had no token."""

    digest: str | None  # of its adapter; None: the base
    num_adapter_pages: int
    num_tokens: int  # of its prompt that are to be computed where it is
    num_cached_tokens: int  # of its prompt whose KV is kept where it is
    num_moves: int  # so far
    tenant: str = ""
    weight: float = 1.0  # its tenant's


@dataclass(frozen=True)
class GangQueue:
    """What waits in one gang."""

    key: str
    num_queued_tokens: int  # of all routers
    num_waiting: int  # of all routers; not those that wait for their adapter
    oldest_waiting_s: float
    costs: GangCosts
    num_own: int  # sequences of this router that have had no token there
    newest: Sequence[WaitingSequence]  # of these, the newest first, as many as may be examined
    has_adapter: Callable[[str], bool]  # by digest: there, or coming
    num_before: TokensBefore
    takes: bool = True  # False: its load does not include yet what was just moved there

    @property
    def s_per_token(self) -> float:
        """What a token of the queue costs: as was measured, or more if the oldest sequence has waited for longer."""
        if not self.num_waiting:
            return self.costs.s_per_waiting_token
        return max(self.costs.s_per_waiting_token, self.oldest_waiting_s / max(1, self.num_queued_tokens))

    @property
    def wait_s(self) -> float:
        """Until a sequence that came now would begin."""
        return self.num_queued_tokens * self.s_per_token


class Relocation(NamedTuple):
    source: str
    place: int  # of the sequence in the source's `newest`
    target: str


class _Round:
    """What the moves of one round change: tokens that come to gangs or leave them, by gang and tenant."""

    def __init__(self) -> None:
        self._of_tenant: Counter[tuple[str, str]] = Counter()
        self._of_all: Counter[str] = Counter()

    def add(self, queue: GangQueue, tenant: str, num_tokens: float) -> None:
        self._of_tenant[queue.key, tenant] += round(num_tokens)
        self._of_all[queue.key] += round(num_tokens)

    def num_before(self, queue: GangQueue, sequence: WaitingSequence) -> float:
        """Tokens before a sequence of this one's tenant that came now."""
        more, more_of_all = self._of_tenant[queue.key, sequence.tenant], self._of_all[queue.key]
        return queue.num_before(sequence.tenant, sequence.weight, more, more_of_all)


def relocations(queues: Sequence[GangQueue], config: RelocationConfig) -> list[Relocation]:
    """The moves of one round, of the longest queue first. The cost grows with gangs and with examined sequences."""
    moved, examined = _Round(), _Round()
    moves: list[Relocation] = []
    num_moved_tokens = 0
    shortest = sorted((queue for queue in queues if queue.takes), key=lambda queue: (queue.wait_s, queue.key))[
        : config.max_targets
    ]
    for source in sorted(queues, key=lambda queue: (-queue.wait_s, queue.key)):
        num_own_waiting = min(source.num_own, source.num_waiting)
        if source.wait_s <= config.least_gain_s or not num_own_waiting:
            continue
        targets = [target for target in shortest if target is not source]
        num_each = source.num_waiting / num_own_waiting  # sequences of all routers for each of this one's
        for place, sequence in enumerate(source.newest[:num_own_waiting]):
            if len(moves) >= config.max_sequences or num_moved_tokens >= config.max_tokens:
                return moves
            num_tokens = sequence.num_tokens + sequence.num_cached_tokens
            examined.add(source, sequence.tenant, -num_each * sequence.num_tokens)
            num_ahead = examined.num_before(source, sequence)
            wait_s = max(0.0, num_ahead) * source.s_per_token - config.least_gain_s * 2**sequence.num_moves
            best = min(
                ((_begin_s(sequence, moved.num_before(t, sequence), source, t), t.key, t) for t in targets),
                default=None,
            )
            if best is None or best[0] >= wait_s:
                continue
            moves.append(Relocation(source.key, place, best[1]))
            num_moved_tokens += num_tokens
            moved.add(best[2], sequence.tenant, num_each * num_tokens)
            moved.add(source, sequence.tenant, -num_each * sequence.num_tokens)
    return moves


def _begin_s(sequence: WaitingSequence, num_before: float, source: GangQueue, target: GangQueue) -> float:
    """Seconds until the sequence would begin at the target, with what else it would lose by the move."""
    costs = target.costs
    wait_s = num_before * max(source.s_per_token, target.s_per_token)
    lost_s = sequence.num_cached_tokens * costs.s_per_queued_token
    if sequence.digest is not None and not target.has_adapter(sequence.digest):
        # Its load begins when it comes there, but takes the place of others' adapters.
        lost_s += sequence.num_adapter_pages * costs.s_per_page * (1 + costs.num_evictions_per_load)
    return wait_s + lost_s
