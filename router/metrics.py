"""Counters of one router and their Prometheus text. No label names a tenant or an adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..workers.wire.engine_load import EngineLoad
from ..workers.wire.messages import RefusalReason, SequenceError
from .fleet.leader_connection import FaultKind
from .histogram import Histogram

FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUEUE_WAIT_BOUNDS_S = (0.001, *FIRST_TOKEN_BOUNDS_S, 120.0, 300.0, 600.0)  # up to the start of a gang on a new machine
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
LOOP_HELD_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Written by request handlers on the router's event loop; read at a scrape."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.num_open_generations = 0
        self.num_resumed_streams = 0  # streams that a client resumed with Last-Event-ID
        self.num_broken_streams = 0  # streams with the status 200 that ended with an error event
        self.refused: Counter[RefusalReason] = Counter()  # requests
        self.num_timed_out = 0  # requests whose answer was not complete in time
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.queue_wait_s = Histogram(QUEUE_WAIT_BOUNDS_S)  # of sequences that got a first token
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)  # between updates of a sequence
        self.loop_held_s = Histogram(LOOP_HELD_BOUNDS_S)  # written by the watchdog of the loop
        self.num_held_body_bytes = 0  # of JSON bodies that arrive or wait to be decoded
        self.dropped_log_lines: Callable[[], int] = lambda: 0  # how many there were; whoever writes the log knows
        self.last_token_at: float | None = None  # time.perf_counter()

    def count_failure(self, error: SequenceError) -> None:
        """Counts a request that failed with this error."""
        if error.kind == "overloaded" and error.reason is not None:
            self.refused[error.reason] += 1
        self.num_timed_out += error.kind == "timeout"

    def exposition(
        self,
        load: EngineLoad | None,
        num_resumed: int,
        num_moved: int,
        num_gang_faults: Mapping[FaultKind, int],
        is_registry_connected: bool,
    ) -> bytes:
        """Prometheus' text format. `load`: of the engine; None: no gang is connected. The others: see Dispatcher."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self, load, num_resumed, num_moved, num_gang_faults, is_registry_connected))
        return generate_latest(registry)


class _Families(Collector):
    def __init__(
        self,
        metrics: Metrics,
        load: EngineLoad | None,
        num_resumed: int,
        num_moved: int,
        num_gang_faults: Mapping[FaultKind, int],
        is_registry_connected: bool,
    ) -> None:
        self._metrics = metrics
        self._is_registry_connected = is_registry_connected
        self._load = load
        self._num_resumed, self._num_moved = num_resumed, num_moved
        self._num_gang_faults = num_gang_faults

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        help_text = "Requests by route and status; 499: the client disconnected before the end."
        requests = CounterMetricFamily("motet_requests", help_text, labels=("route", "status"))
        for (route, status), count in sorted(metrics.requests.items()):
            requests.add_metric((route, str(status)), count)
        yield requests
        yield GaugeMetricFamily("motet_open_generations", "Requests being answered.", metrics.num_open_generations)
        yield CounterMetricFamily(
            "motet_broken_streams", "Streams that ended with an error event after a 200.", metrics.num_broken_streams
        )
        yield CounterMetricFamily(
            "motet_resumed_streams", "Streams that a client resumed.", metrics.num_resumed_streams
        )
        refused = CounterMetricFamily(
            "motet_refused_requests", "Requests that could not be served in time.", labels=("reason",)
        )
        for reason in get_args(RefusalReason):
            refused.add_metric((reason,), metrics.refused[reason])
        yield refused
        yield CounterMetricFamily(
            "motet_timed_out_requests", "Answers that were not complete within their timeout.", metrics.num_timed_out
        )
        help_text = "Bytes of JSON bodies that arrive or wait to be decoded."
        yield GaugeMetricFamily("motet_held_body_bytes", help_text, metrics.num_held_body_bytes)
        yield GaugeMetricFamily(
            "motet_registry_connected",
            "1 if this router receives changes from the registry; if not, uploads fail and chats go on.",
            float(self._is_registry_connected),
        )
        yield CounterMetricFamily("motet_prompt_tokens", "Prompt tokens of requests.", metrics.num_prompt_tokens)
        yield CounterMetricFamily("motet_completion_tokens", "Tokens of answers.", metrics.num_completion_tokens)
        yield CounterMetricFamily(
            "motet_dropped_log_lines",
            "Lines of this router's log that found no room, or could not be written.",
            metrics.dropped_log_lines(),
        )
        for name, help_text, histogram in (
            ("motet_first_token_seconds", "From request to first token.", metrics.first_token_s),
            ("motet_queue_wait_seconds", "From request to the plan of its first step.", metrics.queue_wait_s),
            ("motet_inter_token_seconds", "Between updates of a sequence.", metrics.inter_token_s),
            ("motet_loop_held_seconds", "By how much the router's own timer came late.", metrics.loop_held_s),
        ):
            yield HistogramMetricFamily(name, help_text, histogram.buckets(), histogram.sum)
        help_text = "Sequences that went on at another gang after theirs was lost."
        yield CounterMetricFamily("motet_resumed_sequences", help_text, self._num_resumed)
        help_text = "Waiting sequences that moved to a gang that was to begin them sooner."
        yield CounterMetricFamily("motet_moved_sequences", help_text, self._num_moved)
        faults = CounterMetricFamily(
            "motet_gang_faults", "Gangs that were lost without having been told to go.", labels=("kind",)
        )
        for kind in get_args(FaultKind):  # kinds without a fault, too, so that the first fault is an increase
            faults.add_metric((kind,), self._num_gang_faults.get(kind, 0))
        yield faults
        yield GaugeMetricFamily("motet_gang_connected", "1 if a gang is connected.", float(self._load is not None))
        if self._load is not None:
            yield from _engine_families(self._load)


def _engine_families(load: EngineLoad) -> Iterator[Metric]:
    for field in msgspec.structs.fields(load.gauges):
        yield GaugeMetricFamily(_name(field.name), _help_text(field), getattr(load.gauges, field.name))
    for field in msgspec.structs.fields(load.counters):
        yield CounterMetricFamily(_name(field.name), _help_text(field), getattr(load.counters, field.name))


def _help_text(field: msgspec.structs.FieldInfo) -> str:
    """The description of an EngineLoad's field, which each of them has."""
    (meta,) = field.type.__metadata__
    return str(meta.description)


def _name(field: str) -> str:
    return f"motet_engine_{field.removeprefix('num_')}"
