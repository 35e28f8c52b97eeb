"""Asks gangs for waiting sequences back that another gang would begin sooner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from ...workers.wire.messages import AdapterRef
from .affinity import GangCosts
from .known_gang import KnownGang
from .leader_connection import LeaderConnection
from .open_sequence import OpenSequence

# Which waiting sequences move to another gang: a pure policy of what a router knows at that moment.
#
# A sequence is routed when it comes. Later a gang may be added, or work off its queue sooner than was expected, while
# the sequence waits elsewhere. So the newest of those that wait in a queue move to a gang that would begin them
# sooner: the others of their tenant have waited longer, and one that leaves from the end delays no other. What a
# sequence has before it, where it is and elsewhere, is what comes before its tenant's last in the gang's fair order.
#
# A move must be worth it: the sequence has to gain more than the load of its adapter and the kept beginning of its
# prompt cost at the other gang, and a least time that doubles with each of its moves. A gang is not believed to be
# faster than the one that the sequence leaves. What is known of a new one is a belief, and one that is faster will
# show it by its empty queue. So what has moved gains nothing by moving back, unless queues change by more than that.
#
# Several routers move sequences at the same time without talking. Each decides as if all of them decided alike, and
# moves its own share.

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


ROUND_S = 0.25  # between two rounds
REST_S = 1.0  # after sequences were moved to a gang: by then its load includes them
_MAX_RECALLED = 256  # of one gang and not given back yet: no more are requested


class Relocator:
    """Runs a round when a gang has reported its load, but at most every `ROUND_S`.

    A sequence stays where it is until its gang gives it back, which it does only if it still waits. So it is never in
    two gangs.
    """

    def __init__(self, connections: Mapping[str, LeaderConnection], adapter_pages: Callable[[AdapterRef], int]) -> None:
        """`connections`: the current gangs by key, read in each round."""
        self._connections, self._adapter_pages = connections, adapter_pages
        self._config = RelocationConfig()
        self._next_round = 0.0
        self._rests_until: dict[str, float] = {}  # by key: gangs that sequences were moved to

    def run_round(self) -> None:
        """Moves waiting sequences, if it is time for a round."""
        if len(self._connections) < 2:
            return
        now = asyncio.get_running_loop().time()
        if now < self._next_round:
            return
        self._next_round = now + ROUND_S
        self._rests_until = {key: until for key, until in self._rests_until.items() if until > now}
        connected = {key: leader for key, leader in self._connections.items() if leader.info is not None}
        if len(connected) < 2:
            return
        num_sources = sum(connection.known_gang.load.gauges.num_waiting > 0 for connection in connected.values())
        if not num_sources:
            return
        num_examined = max(1, self._config.max_examined // num_sources)
        candidates: dict[str, list[OpenSequence]] = {key: [] for key in connected}
        queues = [self._queue(key, leader, candidates[key], num_examined) for key, leader in connected.items()]
        for source, place, target in relocations(queues, self._config):
            connected[source].withdraw(candidates[source][place], target)
            self._rests_until[target] = now + REST_S

    def _queue(
        self, key: str, connection: LeaderConnection, candidates: list[OpenSequence], num_examined: int
    ) -> GangQueue:
        """Its queue, without sequences that are being recalled. `candidates` gets the sequences of its `newest`."""
        view = connection.known_gang.view(key, None)
        num_recalled = num_tokens = 0
        recalled: Counter[str] = Counter()  # tokens, by tenant
        newest: list[WaitingSequence] = []
        if view.num_waiting:
            for sequence, unbegun in islice(connection.newest_unbegun(), _MAX_RECALLED + num_examined):
                if unbegun.target is not None:
                    num_recalled += 1
                    num_tokens += sequence.num_tokens - unbegun.num_cached_tokens
                    recalled[sequence.request.tenant] += sequence.num_tokens - unbegun.num_cached_tokens
                elif len(newest) < num_examined:
                    candidates.append(sequence)
                    newest.append(self._waiting(sequence, unbegun.num_cached_tokens))
        return GangQueue(
            key,
            max(0, connection.known_gang.num_queued_tokens - num_tokens),
            max(0, view.num_waiting - num_recalled),
            connection.known_gang.load.gauges.oldest_waiting_s,
            view.costs,
            connection.num_unbegun - num_recalled,
            newest if num_recalled < _MAX_RECALLED else [],
            connection.known_gang.has,
            partial(_num_before, connection.known_gang, num_tokens, recalled),
            takes=key not in self._rests_until,
        )

    def _waiting(self, sequence: OpenSequence, num_cached_tokens: int) -> WaitingSequence:
        adapter = sequence.request.adapter
        return WaitingSequence(
            None if adapter is None else adapter.digest,
            0 if adapter is None else self._adapter_pages(adapter),
            sequence.num_tokens - num_cached_tokens,
            num_cached_tokens,
            sequence.num_moves,
            sequence.request.tenant,
            sequence.request.weight,
        )


def _num_before(
    gang: KnownGang,
    num_recalled: int,
    recalled: Mapping[str, int],
    tenant: str,
    weight: float,
    num_more: int,
    num_more_of_all: int,
) -> float:
    """A `TokensBefore`. `recalled`: tokens by tenant that are about to leave; `num_recalled`: all of them."""
    return gang.num_tokens_before(tenant, weight, num_more - recalled.get(tenant, 0), num_more_of_all - num_recalled)
