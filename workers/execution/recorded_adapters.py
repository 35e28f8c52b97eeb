"""The adapters' tables that recorded steps read, shared by all recordings, which never run at the same time."""

from __future__ import annotations

from typing import Protocol

from ..models.step_adapters import StepAdapters


class Reserved(Protocol):
    """The part of `AdapterTables` that recordings need."""

    def reserve(self, num_rows: int, num_segments: int) -> StepAdapters | None: ...

    def part(self, reserved: StepAdapters, num_rows: int, num_segments: int) -> StepAdapters: ...

    def refill(self, reserved: StepAdapters, step: StepAdapters) -> bool: ...


class RecordedAdapters:
    """Room for the adapters of the largest recorded step, of which each recording reads as much as its own rows need.

    Tables name every page that an adapter may lie in: a room for each recording would take a good part of a GPU.
    """

    def __init__(self, tables: Reserved, max_rows: int, max_segments: int) -> None:
        self._tables = tables
        self._room = tables.reserve(max_rows, max_segments)
        self._held: tuple[StepAdapters, StepAdapters] | None = None  # a part, and the step whose adapters it holds

    def part(self, num_rows: int, num_segments: int) -> StepAdapters | None:
        """The tables for a recording of this size; None: recordings cannot hold adapters of this base."""
        return None if self._room is None else self._tables.part(self._room, num_rows, num_segments)

    def hold(self, part: StepAdapters, step: StepAdapters) -> bool:
        """Copies a step's adapters into a part, valid until the next call. False: they do not fit."""
        # Beyond a smaller part may be data of an earlier step, so another part with the same adapters is refilled.
        if self._held is None or self._held[0] is not part or self._held[1] is not step:
            self._held = (part, step) if self._tables.refill(part, step) else None
        return self._held is not None
