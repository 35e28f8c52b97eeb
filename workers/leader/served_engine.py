"""What a leader needs of the engine that it serves to routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ..engine_messages import EngineMessage
from ..wire.engine_load import EngineLoad, TenantShare
from ..wire.messages import ResidencyChange, SequenceUpdate

# Settings of a gang's leader that its engine does not read.


@dataclass(frozen=True, kw_only=True)
class LeaderConfig:
    """What may wait in one gang, and how long it keeps sequences. A field with a default is no setting."""

    max_waiting_sequences: int  # that have no token yet; more are refused
    max_waiting_tokens: int = 4 << 20  # of their prompts, some 50 bytes of memory each; one may always wait
    tenant_queue_share: float  # of both, that one tenant may take; one of its sequences may always wait
    max_num_sequences: int  # that run at once
    tenant_running_share: float  # of these, that one tenant may have in the engine; 1: there is no bound
    drain_s: float = 5.0  # how long sequences may go on once the gang is to stop
    orphan_s: float = 60.0  # from the end of their router's stream: long enough to replace a router
    finished_s: float = 10.0  # from their end, while their router's stream goes on
    max_finished: int = 1024  # sequences that have ended and are kept
    max_finished_values: int = 4 << 20  # tokens and log-probabilities of those, together

    @property
    def max_tenant_running(self) -> int | None:
        """Sequences of one tenant that the engine may have at once; None: no limit."""
        if self.tenant_running_share == 1:
            return None
        return max(1, int(self.tenant_running_share * self.max_num_sequences))


class StepReport(msgspec.Struct, frozen=True):
    """What one step of an engine brought."""

    updates: Sequence[SequenceUpdate]
    load: EngineLoad
    residency: ResidencyChange = ResidencyChange()
    shares: Sequence[TenantShare] = ()  # some of those that have changed since they were last reported


OnStep = Callable[[StepReport], None]


class ServedEngine(Protocol):
    """An engine that steps in a thread of its own, as `EngineLoop` does. All methods are thread-safe."""

    @property
    def alive(self) -> bool:
        """False: it computes nothing any more."""

    def start(self, on_step: OnStep) -> None:
        """Starts the thread, from which `on_step` is called after each step."""

    def receive(self, message: EngineMessage) -> None:
        """Takes a message; what follows from it comes with a later step's report."""

    def stop(self) -> None: ...
