"""The way of a sequence from a request handler to a gang and back.

Request handlers know `Dispatcher` and `SequenceStream`; `FleetDispatcher` is the implementation that talks to gangs. A
sequence outlives its gang: when the gang dies or stops, the sequence continues at another one from its
prompt and the tokens so far, and its reader notices a pause. While no gang is connected, sequences wait for one a
bounded time. A sequence that its client resumes after the loss of a router goes to the gang that has kept it; it waits
a moment until that gang reports it. A sequence whose client does not read is paused until it does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from ...workers.wire.engine_load import EngineLoad, summed
from ...workers.wire.messages import (
    AdapterRef,
    GangInfo,
    SamplingParams,
    SequenceError,
    SequenceRequest,
    SequenceUpdate,
    SequenceUsage,
)
from .admission import AdmissionConfig, TimeLimit
from .affinity import RoutingConfig
from .fair_queue import QueueUse, is_in_share, tenant_to_preempt
from .fleet import STORE_PAUSE_S, Fleet
from .known_gang import AdapterTier
from .leader_connection import FaultKind, LeaderConnection
from .open_sequence import OpenSequence

# Sequences that no gang computes at present, since their readers have too much unread.


class UnreadSequences:
    """A `SequencePlace`. Belongs to one event loop."""

    def __init__(self, on_read: Callable[[OpenSequence], None]) -> None:
        """`on_read` gets a sequence when its reader has taken all updates; it has no place then."""
        self._on_read = on_read
        self._sequences: dict[OpenSequence, None] = {}
        self._num_of: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter([*self._sequences])

    def num_of(self, tenant: str) -> int:
        return self._num_of[tenant]

    def add(self, sequence: OpenSequence) -> None:
        """Adds a sequence that has no place."""
        sequence.move(None, self)
        self._sequences[sequence] = None
        self._num_of[sequence.request.tenant] += 1
        sequence.when_read(self._resume)

    def remove(self, sequence: OpenSequence) -> None:
        """Removes the sequence, which has no place then."""
        sequence.move(self, None)
        self.cancel(sequence)

    def cancel(self, sequence: OpenSequence) -> None:
        del self._sequences[sequence]
        self._num_of[sequence.request.tenant] -= 1
        if not self._num_of[sequence.request.tenant]:
            del self._num_of[sequence.request.tenant]

    def _resume(self, sequence: OpenSequence) -> None:
        self.remove(sequence)
        self._on_read(sequence)


# Sequences that a router has not sent, or must send again, and that wait a bounded time for a gang.


class UnsentSequences:
    """A `SequencePlace`. Iterates over its sequences in the order of their arrival. Belongs to one event loop."""

    def __init__(self, timeout_s: float, on_timeout: Callable[[OpenSequence], None]) -> None:
        """`on_timeout` gets a sequence that has waited for `timeout_s`, and has no place any more."""
        self._timeout_s, self._on_timeout = timeout_s, on_timeout
        self._timers: dict[OpenSequence, asyncio.TimerHandle] = {}
        self._uses: dict[str, QueueUse] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._timers)

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter([*self._timers])

    def num_of(self, tenant: str) -> int:
        return self._uses[tenant].num if tenant in self._uses else 0

    def has_room(self, sequence: OpenSequence, num_places: int) -> tuple[bool, OpenSequence | None]:
        """Whether the sequence may be added, and which other one is given up for it, if any.

        `num_places`: for all tenants. A tenant that is within its share of them is admitted in any case.
        """
        if len(self) < num_places:
            return True, None
        tenant, weight = sequence.request.tenant, sequence.request.weight
        preempted = tenant_to_preempt(tenant, weight, self._uses)
        if preempted is None:
            return is_in_share(tenant, weight, self._uses, num_places), None
        return True, next(
            candidate
            for candidate in reversed(self._timers)
            if candidate.request.tenant == preempted and candidate.may_move
        )

    def add(self, sequence: OpenSequence) -> None:
        """Adds a sequence that has no place."""
        sequence.move(None, self)
        use = self._uses.setdefault(sequence.request.tenant, QueueUse())
        use.num += 1
        use.num_committed += not sequence.may_move
        use.weight = sequence.request.weight
        self._timers[sequence] = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, sequence)

    def remove(self, sequence: OpenSequence) -> None:
        """Removes the sequence, which has no place then."""
        sequence.move(self, None)
        self.cancel(sequence)

    def cancel(self, sequence: OpenSequence) -> None:
        self._timers.pop(sequence).cancel()
        use = self._uses[sequence.request.tenant]
        use.num -= 1
        use.num_committed -= not sequence.may_move
        if not use.num:
            del self._uses[sequence.request.tenant]

    def _time_out(self, sequence: OpenSequence) -> None:
        self.remove(sequence)
        self._on_timeout(sequence)


# New sequences that may wait while no gang is connected. Beyond that, the tenant with the longest queue is refused; no
# tenant is refused because of another one's queue.
MAX_AWAITING_GANG = 1024
# Sequences that may wait here for anything else, of each kind: for the gang that holds them, for a store that cannot be
# read, or for their own readers. Beyond that the tenant with the longest queue is refused, and any tenant that has half
# of it. A sequence that has begun is not refused while it waits for its gang or the store: all clients of a router that
# died come back at the same time.
MAX_AWAITING = 1024
# A sequence is given up when this number of gangs has died with it since its last token: it may be what kills them. A
# sequence that never had a token is the likelier cause, so it is given up earlier.
MAX_LOSSES_BEFORE_BEGUN = 2
MAX_LOSSES = 3
# A gang that died before it confirmed the sequence does not count above. This bounds a sequence that kills gangs faster
# than they can confirm it.
MAX_FAILED_SENDS = 10
MAX_STORE_FAILURES = 6  # failed reads of its adapter, at all gangs together, after which a sequence is given up
MAX_PAUSE_S = 600.0  # for which a tenant's sequences are held, unless it pauses again
NEWS_WAIT_S = 0.5  # how long a resumed sequence waits for the gang that holds it to report it

_GAVE_WAY = SequenceError(
    "overloaded",
    "too many of your sequences wait at this router, and tenants with fewer need room; try again later",
    reason="tenant_full",
)
_log = logging.getLogger(__name__)


class SequenceStream(Protocol):
    """One submitted sequence: an async iterator that ends after an update with `finish_reason` or `error`."""

    def __aiter__(self) -> AsyncIterator[SequenceUpdate]: ...

    def cancel(self) -> None:
        """Forgets the sequence and frees its memory at the leader. No-op when it has ended."""

    @property
    def usage(self) -> SequenceUsage:
        """What it has cost so far, as far as that is known."""

    @property
    def usage_at(self) -> float | None:
        """When a gang has reported the usage last, by `time.perf_counter()`; None: it has not."""

    @property
    def is_reported(self) -> bool:
        """`usage` is final, if the sequence has ended or was cancelled."""

    async def reported(self) -> None:
        """Waits until the usage of a sequence that has ended or was cancelled is final."""


class Dispatcher(Protocol):
    """Sends sequences to gangs."""

    @property
    def num_resumed(self) -> int:
        """How often a sequence has continued at another gang, or waited for one, because it lost its own."""

    @property
    def num_moved(self) -> int:
        """How often a sequence has left a gang's queue for one where it would begin sooner."""

    @property
    def num_gang_faults(self) -> Mapping[FaultKind, int]:
        """Gangs that were lost by a fault and not by being stopped, by kind."""

    def submit(
        self, request: SequenceRequest, *, is_resumed: bool = False, limit: TimeLimit | None = None
    ) -> SequenceStream:
        """Starts a sequence. If no gang takes it, its update has the error "gang_lost" or "overloaded".

        `request`: what its client asks for; the dispatcher gives it an id. Without a seed its draws follow from its
        key; without either they are random. A sequence with a key can be resumed at any router (`is_resumed`), which
        returns all its tokens from the first one on. It is admitted like a new one, unless a gang holds it or `limit`
        says that it has begun.

        `limit`: a sequence that cannot be served in time gets "overloaded" at once; one that has not ended at its
        timeout gets "timeout".
        """

    def gang(self) -> GangInfo | None:
        """Facts of a connected gang; None: none is connected."""

    def gangs(self) -> Sequence[tuple[GangInfo, EngineLoad]]:
        """Every connected gang with its latest load."""

    def bring(self, request: SequenceRequest, num_gangs: int, wait_s: float) -> Mapping[str, SequenceStream]:
        """Starts a sequence at each of `num_gangs` gangs, or at all if there are fewer; by the ids of the gangs.

        They end with "gang_lost" if their gang is lost. Each gets "overloaded" if it still waits after `wait_s`.
        """

    def residency(self, asker: str, digest: str, known_gangs: Collection[str] = ()) -> Mapping[str, AdapterTier]:
        """The connected gangs that have this adapter for this asker, by their ids, and the fastest tier that has it.

        They have lately got its sequences with it from this router, or are among `known_gangs`. Gangs that
        have the same content only for others are left out. `asker`: see `adapter_uses.py`.
        """

    def load(self) -> EngineLoad | None:
        """The latest load, summed over the connected gangs, the oldest wait of all; None: none is connected."""

    def hold(self, tenant: str) -> None:
        """No gang computes the tenant's sequences until `release`, but for background ones. None of their tokens is
        lost. No-op while they are held.
        """

    def release(self, tenant: str) -> None:
        """The tenant's sequences go on. No-op unless they are held."""


class FleetDispatcher:
    """The `Dispatcher` over gRPC. Belongs to one event loop; `update` sets its gangs."""

    def __init__(
        self,
        token: str,
        gang_wait_s: float,
        on_wait: Callable[[], None] = lambda: None,
        *,
        adapter_pages: Callable[[AdapterRef], int],
        admission: AdmissionConfig,
    ) -> None:
        """`gang_wait_s`: how long a sequence waits while no gang is connected. `on_wait` is called when one begins to.

        `adapter_pages`: how many pages an adapter takes in a gang's pool.
        """
        self._fleet = Fleet(
            token,
            RoutingConfig(),
            admission,
            adapter_pages,
            on_connect=self._connected,
            on_lost=self._lost,
            on_orphans=self._send_found,
            on_unplaced=self._send,
            on_store_failure=self._lost_store,
        )
        self._gang_wait_s = gang_wait_s
        self._on_wait = on_wait
        self._awaiting_gang = UnsentSequences(gang_wait_s, self._give_up)  # no gang is connected
        self._awaiting_news = UnsentSequences(NEWS_WAIT_S, self._send)  # of the gang that holds the sequence
        self._unread = UnreadSequences(self._send)
        self._awaiting_store = UnsentSequences(STORE_PAUSE_S, self._send)  # no gang could read the adapter
        self._paused_tenants: set[str] = set()
        self._awaiting_resume = UnsentSequences(MAX_PAUSE_S, self._send)  # of tenants that pause
        self._closed = False
        self._num_resumed = 0

    @property
    def num_resumed(self) -> int:
        return self._num_resumed

    @property
    def num_moved(self) -> int:
        return self._fleet.num_moved

    @property
    def num_gang_faults(self) -> Mapping[FaultKind, int]:
        return self._fleet.num_faults

    def update(self, addresses: Mapping[str, str]) -> None:
        """Makes these the gangs: the address of each leader, by the key of its gang."""
        _log.info("gangs: %s", ", ".join(f"{key} at {address}" for key, address in addresses.items()) or "none")
        self._fleet.update(addresses)

    def submit(
        self, request: SequenceRequest, *, is_resumed: bool = False, limit: TimeLimit | None = None
    ) -> OpenSequence:
        if request.sampling.seed is None:  # drawn here, so that another gang would go on with the same draws
            seed = _seed_of(request.key) if request.key else secrets.randbits(63)
            sampling = msgspec.structs.replace(request.sampling, seed=seed)
            request = msgspec.structs.replace(request, sampling=sampling)
        sequence = OpenSequence(request, is_resumed=is_resumed, limit=limit)
        if is_resumed and not self._fleet.holds(request.key):
            self._wait_in(self._awaiting_news, sequence, "were resumed and wait for the gang that holds them")
        else:
            self._send(sequence)
        return sequence

    def change_admission(self, admission: AdmissionConfig) -> None:
        """New sequences are admitted by this configuration."""
        self._fleet.change_admission(admission)

    def outdate(self, digest: str) -> None:
        """Notifies the gangs that no name points to the adapter any more, so that they need not keep it."""
        self._fleet.outdate(digest)

    def connected(self) -> Sequence[LeaderConnection]:
        """Connections to the gangs that take sequences now."""
        return self._fleet.connected

    def gang(self) -> GangInfo | None:
        for leader in self._fleet.connected:
            return leader.info
        return None

    def gangs(self) -> list[tuple[GangInfo, EngineLoad]]:
        """Every connected gang with its latest load."""
        return [(leader.info, leader.load) for leader in self._fleet.connected if leader.info is not None]

    def bring(self, request: SequenceRequest, num_gangs: int, wait_s: float) -> Mapping[str, OpenSequence]:
        sequences = [OpenSequence(request) for _ in range(num_gangs)]
        gang_ids = self._fleet.bring(sequences, wait_s)
        return dict(zip(gang_ids, sequences[: len(gang_ids)], strict=True))

    def residency(self, asker: str, digest: str, known_gangs: Collection[str] = ()) -> Mapping[str, AdapterTier]:
        tiers: dict[str, AdapterTier] = {}
        for connection in self._fleet.connected:
            if connection.info is not None:
                is_known = connection.info.gang_id in known_gangs
                if (tier := connection.known_gang.tier_for(asker, digest, is_known=is_known)) is not None:
                    tiers[connection.info.gang_id] = tier
        return tiers

    def load(self) -> EngineLoad | None:
        loads = [leader.load for leader in self._fleet.connected]
        return summed(loads) if loads else None

    def hold(self, tenant: str) -> None:
        if tenant not in self._paused_tenants:
            self._paused_tenants.add(tenant)
            self._fleet.take_back(tenant)

    def release(self, tenant: str) -> None:
        self._paused_tenants.discard(tenant)
        for sequence in self._awaiting_resume:
            if sequence.request.tenant == tenant:
                self._awaiting_resume.remove(sequence)
                self._send(sequence)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait because no gang is connected."""
        return len(self._awaiting_gang)

    async def close(self) -> None:
        """Ends all connections; open sequences end with "gang_lost"."""
        self._closed = True
        for unsent in (
            self._awaiting_gang,
            self._awaiting_news,
            self._awaiting_store,
            self._unread,
            self._awaiting_resume,
        ):
            for sequence in unsent:
                unsent.remove(sequence)
                sequence.fail("gang_lost", "this router is shutting down")
        await self._fleet.close()

    def _send(self, sequence: OpenSequence) -> None:
        if sequence.is_overfull:
            self._wait_in(self._unread, sequence, "wait for their clients to read")
            return
        if self._is_paused(sequence):
            self._wait_in(self._awaiting_resume, sequence, "wait, as your tenant has paused its requests,")
            return
        if self._fleet.submit(sequence):
            return
        # Resumed sequences that had begun have as much room again, since many clients may come back at once.
        limit = (2 if sequence.limit.has_begun else 1) * MAX_AWAITING_GANG
        if sequence.has_begun or self._makes_room(self._awaiting_gang, sequence, limit):
            sequence.drop_wait_limit()
            self._awaiting_gang.add(sequence)
            self._on_wait()
        else:
            message = "no gang is connected, and the queue for one is full; try again later"
            sequence.refuse(SequenceError("overloaded", message, reason="no_gang"))

    def _is_paused(self, sequence: OpenSequence) -> bool:
        return sequence.request.tenant in self._paused_tenants and not (
            sequence.request.is_background or sequence.stays
        )

    def _makes_room(self, place: UnsentSequences, sequence: OpenSequence, num_places: int) -> bool:
        """Whether the sequence may wait there. One of a tenant with a longer queue may be given up for it."""
        has_room, given_up = place.has_room(sequence, num_places)
        if given_up is not None:
            place.remove(given_up)
            given_up.refuse(_GAVE_WAY)
        return has_room

    def _lost(self, sequences: list[OpenSequence], reason: str) -> None:
        """Sends the sequences of a lost gang to other gangs, in the order of their submission.

        The reason goes to the log only: it may contain what the engine was computing for another tenant.
        """
        for sequence in sequences:
            limit = MAX_LOSSES if sequence.has_begun else MAX_LOSSES_BEFORE_BEGUN
            if self._closed:
                sequence.fail("gang_lost", "this router is shutting down")
            elif sequence.stays:
                sequence.fail("gang_lost", "the gang that it was sent to was lost")
            elif sequence.num_losses >= limit:
                name = sequence.request.key or "a sequence"
                _log.warning("%s is given up after %d gangs, the last one lost to: %s", name, limit, reason)
                sequence.fail("gang_lost", f"{limit} gangs were lost with this request before its next token")
            elif sequence.num_failed_sends >= MAX_FAILED_SENDS:
                sequence.fail("gang_lost", f"{MAX_FAILED_SENDS} gangs were lost as this request was sent to them")
            else:
                self._num_resumed += not (sequence.is_overfull or self._is_paused(sequence))
                self._send(sequence)

    def _lost_store(self, sequence: OpenSequence, error: SequenceError) -> None:
        """Sends a sequence whose gang cannot read its adapter to another gang, or again after a pause."""
        if self._closed or sequence.stays or sequence.num_store_failures.total() >= MAX_STORE_FAILURES:
            sequence.refuse(error)
            return
        self._num_resumed += 1
        if self._fleet.has_untried(sequence):
            self._send(sequence)
        else:
            self._wait_in(self._awaiting_store, sequence, "wait for their adapters, which cannot be read now")

    def _wait_in(self, place: UnsentSequences | UnreadSequences, sequence: OpenSequence, waiting: str) -> None:
        """Lets the sequence wait there, or refuses it. `waiting`: what sequences there do, for the error message."""
        num_of_tenant = place.num_of(sequence.request.tenant)
        # Only sequences that have begun can be unread, so there the bound holds for them too. What a gang has taken is
        # not refused because its tenant pauses.
        is_exempt = place is not self._unread and (sequence.has_begun or sequence.limit.has_begun)
        is_exempt |= place is self._awaiting_resume and not sequence.is_new
        is_tenants = num_of_tenant >= MAX_AWAITING // 2
        if is_exempt or (not is_tenants and self._has_place(place, sequence)):
            place.add(sequence)
            return
        whose = (
            f"{num_of_tenant} of your" if is_tenants else "too many"
        )  # the number of other tenants' sequences is not revealed
        message = f"{whose} sequences {waiting} at this router already; try again later"
        sequence.refuse(SequenceError("overloaded", message, reason="tenant_full" if is_tenants else "full"))

    def _has_place(self, place: UnsentSequences | UnreadSequences, sequence: OpenSequence) -> bool:
        if isinstance(place, UnreadSequences):
            return len(place) < MAX_AWAITING
        return self._makes_room(place, sequence, MAX_AWAITING)

    def _give_up(self, sequence: OpenSequence) -> None:
        sequence.fail("gang_lost", f"no gang was connected within {self._gang_wait_s:g} s; try again later")

    def _send_found(self) -> None:
        """Sends the waiting sequences that a gang now reports as held."""
        for sequence in self._awaiting_news:
            if self._fleet.holds(sequence.request.key):
                self._awaiting_news.remove(sequence)
                self._send(sequence)

    def _connected(self) -> None:
        self._send_found()
        if not self._fleet.connected:
            return  # the gang that connected is being stopped meanwhile
        for sequence in self._awaiting_gang:
            self._awaiting_gang.remove(sequence)
            self._send(sequence)


def _seed_of(key: str) -> int:
    """63 random-looking bits, which every router derives from the key alike."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) >> 1


# Asks for one token, to prove that tokens can be served.
#
# Where gangs start only when they are requested, this starts one.

PROBE_TENANT = "system"
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


async def probe(dispatcher: Dispatcher) -> str | None:
    """Why no token was served; None: one was. Waits as long as a gang may take to come; it may be cancelled."""
    error: SequenceError | None = None
    stream = dispatcher.submit(SequenceRequest(prompt_token_ids=[0], sampling=_PROBE, tenant=PROBE_TENANT))
    try:
        async for update in stream:
            if update.token_ids:
                return None
            error = update.error or error
    finally:
        stream.cancel()
    return f"no token can be served: {error.message if error is not None else 'the sequence ended without one'}"
