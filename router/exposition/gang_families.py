"""The loads that gangs report in their frames, as metrics: a series for each gang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ...workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad

GANG: Final = "gang"  # the label with the gang's id


def gang_families(loads: Mapping[str, EngineLoad], labels: Mapping[str, str]) -> Iterator[Metric]:
    """The gauges and counters of these gangs, by the id of each. `labels`: of all of them.

    A gang's series ends with it, and another gang begins another one: no counter ever falls.
    """
    names = (GANG, *labels)
    series = [((gang_id, *labels.values()), load) for gang_id, load in loads.items()]
    for field in msgspec.structs.fields(EngineGauges):
        gauge = GaugeMetricFamily(metric_name(field.name), _text(field), labels=names)
        for values, load in series:
            gauge.add_metric(values, getattr(load.gauges, field.name))
        yield gauge
    for field in msgspec.structs.fields(EngineCounters):
        counter = CounterMetricFamily(metric_name(field.name), _text(field), labels=names)
        for values, load in series:
            counter.add_metric(values, getattr(load.counters, field.name))
        yield counter


def metric_name(field: str) -> str:
    """The metric's name for a field of a load, with Prometheus' unit; a counter's without `_total`."""
    name = f"motet_engine_{field.removeprefix('num_')}"
    return f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name


def _text(field: msgspec.structs.FieldInfo) -> str:
    """The description of a load's field, which each of them has."""
    (meta,) = field.type.__metadata__
    return str(meta.description)
