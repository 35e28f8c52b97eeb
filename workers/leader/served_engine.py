"""What a leader needs of the engine that it serves to routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..engine_messages import EngineMessage
from ..wire.engine_load import EngineLoad
from ..wire.fair_shares import TenantShare
from ..wire.messages import ResidencyChange, SequenceUpdate


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
