"""Metrics with labels that all of them have, and Prometheus' text of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..histogram import Histogram


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
