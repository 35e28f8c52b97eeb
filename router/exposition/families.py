"""Metrics with labels, the loads that gangs report, and Prometheus' discovery of targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad
from ..metrics import Histogram


class Families:
    """Makes metrics of one kind each. All of their samples have the same `labels`, and some have more."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """`labels`: of the process, for example {"router": "1f00", "base": "llama"}."""
        self._names, self._values = tuple(labels), tuple(labels.values())

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, (), [((), value)])

    def gauges(
        self, name: str, text: str, more_labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        """`values`: each with those of `more_labels`."""
        family = GaugeMetricFamily(name, text, labels=(*self._names, *more_labels))
        for more, value in values:
            family.add_metric((*self._values, *more), value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """`name`: without `_total`."""
        return self.counters(name, text, (), [((), value)])

    def counters(
        self, name: str, text: str, more_labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        """`values`: each with those of `more_labels`. `name`: without `_total`."""
        family = CounterMetricFamily(name, text, labels=(*self._names, *more_labels))
        for more, value in sorted(values):
            family.add_metric((*self._values, *more), value)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, histogram.buckets(), histogram.sum)
        return family


class _Page(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def text_of(metrics: Iterable[Metric], *collectors: Collector) -> bytes:
    """Prometheus' text format of the metrics, and of what the collectors bring."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(metrics))
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


# The loads that gangs report in their frames, as metrics: a series for each gang.

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


# The nodes of a motet as targets of Prometheus' HTTP service discovery.


class MetricsTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One node that shows the metrics of its processes."""

    address: str  # host and port
    base: str


class TargetGroup(msgspec.Struct, frozen=True):
    """Targets with the same labels, as Prometheus reads them."""

    targets: list[str]
    labels: dict[str, str]


def discovery(targets: Sequence[MetricsTarget]) -> bytes:
    """The answer to Prometheus' `http_sd_configs`: JSON, a group for each node.

    Its series get the label `node`. `__meta_motet_base` is for a configuration that chooses between motets.
    """
    groups = [
        TargetGroup(
            [target.address],
            {"node": target.address.rpartition(":")[0].strip("[]"), "__meta_motet_base": target.base},
        )
        for target in targets
    ]
    return msgspec.json.encode(groups)
