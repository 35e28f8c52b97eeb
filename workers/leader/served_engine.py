"""What a leader needs of the engine that it serves to routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..wire.engine_load import EngineLoad
from ..wire.fair_shares import ServedElsewhere, TenantShare
from ..wire.messages import CANCELLED, ResidencyChange, SequenceError, SequenceRequest, SequenceUpdate

OnStep = Callable[[Sequence[SequenceUpdate], EngineLoad, ResidencyChange], None]


class ServedEngine(Protocol):
    """An engine that steps in a thread of its own, as `EngineLoop` does. All methods are thread-safe."""

    @property
    def alive(self) -> bool:
        """False: it computes nothing any more."""

    def start(self, on_step: OnStep) -> None:
        """Starts the thread, from which `on_step` is called after each step."""

    def submit(self, request: SequenceRequest) -> None: ...

    def cancel(self, sequence_id: int, error: SequenceError = CANCELLED) -> None:
        """Ends the sequence: an update with this error and its usage follows. Unknown ids are ignored."""

    def give_up_waiting(self, sequence_id: int, error: SequenceError) -> None:
        """Ends the sequence with this error, unless it runs or has ended."""

    def outdate(self, digest: str) -> None:
        """No name points to the adapter any more, so it need not be kept."""

    def pin(self, changes: Mapping[str, bool]) -> None:
        """Adapters that host memory must keep from now on (True), and those that it need not keep any more."""

    def charge_elsewhere(self, served: ServedElsewhere) -> None:
        """Tenants come later here for what they have had of all other gangs."""

    def take_shares(self) -> list[TenantShare]:
        """Shares that have changed since they were last taken: some of them, and a few times a second."""

    def stop(self) -> None: ...
