"""The way of a sequence from a request handler to a gang and back.

`Dispatcher` and `SequenceStream` are what request handlers are written against; `FleetDispatcher` is the one that
talks to gangs. A sequence that finds no gang connected waits for one a bounded time, and one whose gang is lost before
its first token is sent once more, so that a request that arrives about when a gang dies is served by its successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from ..workers.messages import (
    AdapterRef,
    EngineLoad,
    GangInfo,
    SamplingParams,
    SequenceRequest,
    SequenceUpdate,
)
from .fleet import Fleet
from .open_sequence import OpenSequence

MAX_PARKED = 1024  # sequences that wait for a gang
MAX_LOST = 1  # gangs that one sequence may be lost with and still be sent again: a request may be what kills them

_log = logging.getLogger(__name__)


class SequenceStream(Protocol):
    """One submitted sequence: an async iterator that ends after an update with `finish_reason` or `error`."""

    def __aiter__(self) -> AsyncIterator[SequenceUpdate]: ...

    def cancel(self) -> None:
        """Forgets the sequence and frees its memory at the leader. No-op when it has ended."""


class Dispatcher(Protocol):
    """Sends sequences to gangs."""

    def submit(
        self, prompt_token_ids: list[int], sampling: SamplingParams, tenant: str, adapter: AdapterRef | None
    ) -> SequenceStream:
        """Starts a sequence. A missing gang is no exception but an update with error "gang_lost" or "overloaded"."""

    def gang(self) -> GangInfo | None:
        """Facts of a connected gang; None: none is connected."""

    def gangs(self) -> Sequence[tuple[GangInfo, EngineLoad]]:
        """Every connected gang with its latest load."""

    def load(self) -> EngineLoad | None:
        """The latest load, summed over the connected gangs; None: none is connected."""


class FleetDispatcher:
    """The `Dispatcher` over gRPC. Belongs to one event loop; `update` tells it the gangs."""

    def __init__(self, token: str, gang_wait_s: float) -> None:
        """`gang_wait_s`: how long a sequence waits for a gang while none is connected."""
        self._fleet = Fleet(token, self._send_parked, self._lost)
        self._gang_wait_s = gang_wait_s
        self._parked: dict[OpenSequence, asyncio.TimerHandle] = {}  # in order of arrival
        self._closed = False

    def update(self, addresses: Mapping[str, str]) -> None:
        """Makes these the gangs: key to address of the leader."""
        _log.info("gangs: %s", ", ".join(f"{key} at {address}" for key, address in addresses.items()) or "none")
        self._fleet.update(addresses)

    def submit(
        self, prompt_token_ids: list[int], sampling: SamplingParams, tenant: str, adapter: AdapterRef | None
    ) -> OpenSequence:
        sequence = OpenSequence(
            SequenceRequest(
                sequence_id=0,  # the connection gives it one
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                tenant=tenant,
                adapter=adapter,
            )
        )
        self._send(sequence)
        return sequence

    def gang(self) -> GangInfo | None:
        for leader in self._fleet.connected:
            return leader.info
        return None

    def gangs(self) -> list[tuple[GangInfo, EngineLoad]]:
        """Every connected gang with its latest load."""
        return [(leader.info, leader.load) for leader in self._fleet.connected if leader.info is not None]

    def load(self) -> EngineLoad | None:
        loads = [leader.load for leader in self._fleet.connected]
        if not loads:
            return None
        names = msgspec.structs.fields(EngineLoad)
        return EngineLoad(**{field.name: sum(getattr(load, field.name) for load in loads) for field in names})

    async def close(self) -> None:
        """Ends all connections; open sequences end with "gang_lost"."""
        self._closed = True
        for sequence in list(self._parked):
            self._give_up(sequence, "this router is shutting down")
        await self._fleet.close()

    def _send(self, sequence: OpenSequence) -> None:
        leader = self._fleet.choose()
        if leader is not None:
            leader.submit(sequence)
        elif len(self._parked) >= MAX_PARKED:
            sequence.fail("overloaded", f"no gang is connected and {MAX_PARKED} requests wait for one; try again later")
        else:
            self._park(sequence)

    def _lost(self, sequences: list[OpenSequence], reason: str) -> None:
        for sequence in sequences:
            sequence.num_lost += 1
            if self._closed or sequence.started or sequence.num_lost > MAX_LOST:
                sequence.fail("gang_lost", f"the gang that served this request was lost ({reason}); send it again")
            else:
                self._send(sequence)

    def _park(self, sequence: OpenSequence) -> None:
        message = f"no gang was connected within {self._gang_wait_s:g} s; try again later"
        timer = asyncio.get_running_loop().call_later(self._gang_wait_s, self._give_up, sequence, message)
        self._parked[sequence] = timer
        sequence.on_cancel = partial(self._unpark, sequence)

    def _unpark(self, sequence: OpenSequence) -> None:
        self._parked.pop(sequence).cancel()

    def _give_up(self, sequence: OpenSequence, message: str) -> None:
        self._unpark(sequence)
        sequence.on_cancel = None
        sequence.fail("gang_lost", message)

    def _send_parked(self) -> None:
        for sequence in list(self._parked):
            leader = self._fleet.choose()
            if leader is None:
                return
            self._unpark(sequence)
            leader.submit(sequence)
