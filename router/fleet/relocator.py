"""Asks gangs for waiting sequences back that another gang would begin sooner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice

from ...workers.wire.messages import AdapterRef
from .known_gang import KnownGang
from .leader_connection import LeaderConnection
from .open_sequence import OpenSequence
from .relocation import GangQueue, RelocationConfig, WaitingSequence, relocations

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
        connected = {key: one for key, one in self._connections.items() if one.info is not None}
        if len(connected) < 2:
            return
        num_sources = sum(connection.known.load.gauges.num_waiting > 0 for connection in connected.values())
        if not num_sources:
            return
        num_examined = max(1, self._config.max_examined // num_sources)
        candidates: dict[str, list[OpenSequence]] = {key: [] for key in connected}
        queues = [self._queue(key, one, candidates[key], num_examined) for key, one in connected.items()]
        for source, place, target in relocations(queues, self._config):
            connected[source].withdraw(candidates[source][place], target)
            self._rests_until[target] = now + REST_S

    def _queue(
        self, key: str, connection: LeaderConnection, candidates: list[OpenSequence], num_examined: int
    ) -> GangQueue:
        """Its queue, without sequences that are being recalled. `candidates` gets the sequences of its `newest`."""
        view = connection.known.view(key, None)
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
            max(0, connection.known.num_queued_tokens - num_tokens),
            max(0, view.num_waiting - num_recalled),
            connection.known.load.gauges.oldest_waiting_s,
            view.costs,
            connection.num_unbegun - num_recalled,
            newest if num_recalled < _MAX_RECALLED else [],
            connection.known.has,
            partial(_num_before, connection.known, num_tokens, recalled),
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
    known: KnownGang,
    num_recalled: int,
    recalled: Mapping[str, int],
    tenant: str,
    weight: float,
    num_more: int,
    num_more_of_all: int,
) -> float:
    """A `TokensBefore`. `recalled`: tokens by tenant that are about to leave; `num_recalled`: all of them."""
    return known.num_tokens_before(tenant, weight, num_more - recalled.get(tenant, 0), num_more_of_all - num_recalled)
