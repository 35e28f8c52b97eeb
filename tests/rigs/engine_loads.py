"""Loads of an engine from a few of their values."""

from __future__ import annotations

from motet.workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad


def engine_load(**values: float) -> EngineLoad:
    """A load with these gauges and counters; the others are zero."""
    gauges = {name: values.pop(name) for name in EngineGauges.__struct_fields__ if name in values}
    return EngineLoad(EngineGauges(**gauges), EngineCounters(**values))  # type: ignore[arg-type]
