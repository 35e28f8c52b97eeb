"""What routers and gangs count as metrics with labels, and Prometheus' discovery of targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ... import __version__
from ...adapters.registry.launches import Kind
from ...workers.wire.engine_load import EngineCounters, EngineGauges, EngineLoad
from ...workers.wire.messages import FinishReason, RefusalReason
from ..fleet.leader_connection import FaultKind
from ..metrics import Histogram, LineResult, Metrics, PauseReason, QuotaCall


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


# What one router has counted, as metrics.

BUILD_INFO: Final = ("motet_build_info", "1; the label is the version of motet.")
WAITING_STARTS: Final = (
    "motet_waiting_starts",
    "Gangs and routers of this cluster that cannot start because the model, a volume or a secret is away; "
    "`motet status` says what. They start by themselves when it is back.",
)
FAILED_STARTS: Final = (
    "motet_failed_starts",
    "Starts that have failed in the last ten minutes, if none of the kind has succeeded since; `motet status` says "
    "why. Others begin without end, with pauses of up to a minute.",
)


@dataclass(frozen=True, kw_only=True)
class RouterFacts:
    """What is counted elsewhere than in `Metrics`."""

    num_gangs: int  # that the router is connected to
    num_resumed: int  # see Dispatcher
    num_moved: int
    num_gang_faults: Mapping[FaultKind, int]
    is_registry_connected: bool


def router_families(metrics: Metrics, facts: RouterFacts, labels: Mapping[str, str]) -> Iterator[Metric]:
    """All metrics of a router. Safe to call while the router counts."""
    make = Families(labels)
    yield make.gauges(*BUILD_INFO, ("version",), [((__version__,), 1)])
    yield from _requests(metrics, make)
    yield from _sequences(metrics, facts, make)
    yield from _uploads(metrics, make)
    yield from _batches(metrics, make)
    help_text = (
        "Gangs that this router lost by a fault, and not by stopping them. engine: the gang reported that it cannot "
        "compute any more; connection: its process or the network died."
    )
    # Kinds without a fault, too, so that the first fault is an increase.
    faults = {(kind,): facts.num_gang_faults.get(kind, 0) for kind in get_args(FaultKind)}
    yield make.counters("motet_gang_faults", help_text, ("kind",), faults.items())
    yield make.gauge("motet_connected_gangs", "Gangs that this router is connected to.", facts.num_gangs)
    yield from _serve(metrics, make)
    help_text = (
        "1 while this router receives changes of the registry. Without it uploads fail, and chats continue with "
        "adapters that the router keeps."
    )
    yield make.gauge("motet_registry_connected", help_text, float(facts.is_registry_connected))
    yield from _starts(metrics, make)
    if metrics.redis_memory is not None:
        used_bytes, max_bytes = metrics.redis_memory
        yield make.gauge("motet_redis_used_bytes", "Memory that Redis uses, as of the last half minute.", used_bytes)
        help_text = "`maxmemory` of Redis; 0 if it has none. At this bound uploads are refused."
        yield make.gauge("motet_redis_max_bytes", help_text, max_bytes)
    help_text = (
        "Batches of messages about quotas that this router has sent to Redis. prompt: answered within 0.1 s; late: "
        "within 2 s; unanswered: not within 2 s; unreachable: the connection was refused, or broke three times."
    )
    outcomes = [((outcome,), metrics.quota_calls.get(outcome, 0)) for outcome in get_args(QuotaCall)]
    yield make.counters("motet_quota_calls", help_text, ("outcome",), outcomes)
    help_text = (
        "How late a timer of the router's event loop, set 50 times a second, fired: every stream waited as long. "
        "What held it for 0.1 s or longer is in the log."
    )
    yield make.histogram("motet_loop_held_seconds", help_text, metrics.loop_held_s)
    help_text = (
        "As much of each value of motet_loop_held_seconds as the router's process computed since the timer was set: on "
        "a busy machine the rest is what others took."
    )
    yield make.histogram("motet_loop_held_cpu_seconds", help_text, metrics.loop_held_cpu_s)
    num_waiting_bytes, behind_s = metrics.ledger()
    help_text = "Entries of the usage ledger on this router's disk that Redis does not have yet."
    yield make.gauge("motet_ledger_waiting_bytes", help_text, num_waiting_bytes)
    help_text = "For how long this router has had a part of the ledger that Redis does not have."
    yield make.gauge("motet_ledger_behind_seconds", help_text, behind_s)
    help_text = "Lines of this router's log that were dropped because its queue was full, or could not be written."
    yield make.counter("motet_dropped_log_lines", help_text, metrics.dropped_log_lines())
    help_text = (
        "Requests that the edge of this router's node refused itself; one router of a node has them. keyless: without "
        "a key; rate: more a second without a known key than --max-keyless-per-second; source, key: more under way "
        "than one address or key may have; headers: too long, or odd; http: no HTTP, or cut off or too slow before it "
        "was a request; connection: connections of one address that were closed at once."
    )
    edge_refused = {(reason,): count for reason, count in metrics.edge_refused().items()}
    yield make.counters("motet_edge_refused", help_text, ("reason",), edge_refused.items())


def _starts(metrics: Metrics, make: Families) -> Iterator[Metric]:
    if metrics.starts is None:
        return  # Redis, which has what is shown here, is away
    waiting = Counter((start.kind,) for start in metrics.starts if not start.has_failed)
    failed = Counter((start.kind,) for start in metrics.starts if start.has_failed)
    kinds = [(kind,) for kind in get_args(Kind)]
    yield make.gauges(*WAITING_STARTS, ("kind",), [(kind, waiting[kind]) for kind in kinds])
    yield make.gauges(*FAILED_STARTS, ("kind",), [(kind, failed[kind]) for kind in kinds])
    help_text = (
        "1 if the application has its configuration before again because gangs of the newest one could not start, "
        "until it gets a new configuration."
    )
    yield make.gauge("motet_rollout_taken_back", help_text, float(metrics.taken_back is not None))


def _serve(metrics: Metrics, make: Families) -> Iterator[Metric]:
    facts = metrics.serve
    if facts is None:
        return
    help_text = (
        "1 if Serve's controller, which runs on the head, answered this router's last call. While it does not, what "
        "the controller says (gangs that it is to run, its status, a rollout) is left out."
    )
    yield make.gauge("motet_head_connected", help_text, float(facts.is_head_connected))
    if not facts.is_head_connected:
        return
    yield make.gauge("motet_wanted_gangs", "Gangs that Ray Serve is to run.", facts.num_wanted_gangs)
    help_text = "Gangs that Serve runs at the least; motet_max_gangs where their number does not change by itself."
    yield make.gauge("motet_min_gangs", help_text, facts.min_gangs)
    yield make.gauge("motet_max_gangs", "Gangs that Serve may run at most, as configured.", facts.max_gangs)
    help_text = "1; the label is the status of motet's application in Serve."
    yield make.gauges("motet_serve_status", help_text, ("status",), [((facts.status,), 1)])
    help_text = "For how long Serve has been deploying or replacing routers or gangs; 0: it does not."
    yield make.gauge("motet_rollout_seconds", help_text, facts.rollout_s)


def _requests(metrics: Metrics, make: Families) -> Iterator[Metric]:
    help_text = "Requests by what they were answered with; 499: the client left before the end."
    requests = {(route, str(status)): count for (route, status), count in dict(metrics.requests).items()}
    yield make.counters("motet_requests", help_text, ("route", "status"), requests.items())
    help_text = (
        "Errors that clients were sent, by status and code (see the API's page), those included that ended a stream "
        "which had begun with a 200."
    )
    errors = {(str(status), code): count for (status, code), count in dict(metrics.errors).items()}
    yield make.counters("motet_errors", help_text, ("status", "code"), errors.items())
    help_text = (
        "Requests answered with 429. wait: they would have had to wait longer than --max-queue-wait; timeout: their "
        "answer was expected after their timeout; objective: their first token was expected after their tenant's "
        "--latency-objective; full: their gang's queue was, or one of their router, as for clients that do not read or "
        "an adapter that cannot be read; tenant_full: their tenant's share of such a queue was; no_gang: too many "
        "sequences waited for any gang; waited: they did wait, twice as long as was expected."
    )
    refused = {(reason,): metrics.refused[reason] for reason in get_args(RefusalReason)}
    yield make.counters("motet_refused_requests", help_text, ("reason",), refused.items())
    help_text = "Answers that were not complete when their timeout passed."
    yield make.counter("motet_timed_out_requests", help_text, metrics.num_timed_out)
    yield make.gauge("motet_open_generations", "Requests that are being answered.", metrics.num_open_generations)
    help_text = "From a completion's or chat's arrival to the end of its answer, of answers that came to an end."
    yield make.histogram("motet_request_seconds", help_text, metrics.request_s)
    help_text = "JSON bodies that arrive or wait to be decoded: 128 MiB at most."
    yield make.gauge("motet_held_body_bytes", help_text, metrics.num_held_body_bytes)


def _sequences(metrics: Metrics, facts: RouterFacts, make: Families) -> Iterator[Metric]:
    help_text = "From request to first token, of each sequence."
    yield make.histogram("motet_first_token_seconds", help_text, metrics.first_token_s)
    help_text = (
        "The part of the time to the first token in which no step had yet been planned for the sequence: tokenizing, "
        "waiting for a gang, for its turn and for its adapter. Sequences without a first token are left out."
    )
    yield make.histogram("motet_queue_wait_seconds", help_text, metrics.queue_wait_s)
    yield make.histogram("motet_inter_token_seconds", "Between updates of a sequence.", metrics.inter_token_s)
    yield make.counter("motet_prompt_tokens", "Tokens of prompts.", metrics.num_prompt_tokens)
    help_text = "Tokens of prompts of complete answers that were not computed, because their KV was there."
    yield make.counter("motet_cached_prompt_tokens", help_text, metrics.num_cached_prompt_tokens)
    yield make.counter("motet_completion_tokens", "Tokens of answers.", metrics.num_completion_tokens)
    yield make.histogram("motet_prompt_length_tokens", "Tokens of a prompt.", metrics.prompt_tokens)
    help_text = "Tokens of a sequence that came to an end."
    yield make.histogram("motet_completion_length_tokens", help_text, metrics.completion_tokens)
    help_text = "Sequences that came to an end, by OpenAI's finish_reason."
    finished = {(reason,): metrics.finished[reason] for reason in get_args(FinishReason)}
    yield make.counters("motet_finished_sequences", help_text, ("reason",), finished.items())
    help_text = "Streams that ended with an error event after a 200."
    yield make.counter("motet_broken_streams", help_text, metrics.num_broken_streams)
    help_text = "Streams that a client resumed."
    yield make.counter("motet_resumed_streams", help_text, metrics.num_resumed_streams)
    help_text = "Sequences that continued at another gang after their gang was lost or had handed them over."
    yield make.counter("motet_resumed_sequences", help_text, facts.num_resumed)
    help_text = "Waiting sequences that moved to a gang that was to begin them sooner."
    yield make.counter("motet_moved_sequences", help_text, facts.num_moved)


def _batches(metrics: Metrics, make: Families) -> Iterator[Metric]:
    help_text = "Lines of batches whose results this router has written. completed: they were answered with 200."
    lines = {(result,): metrics.batch_lines[result] for result in get_args(LineResult)}
    yield make.counters("motet_batch_lines", help_text, ("result",), lines.items())
    help_text = "Batches that this router runs now; those that wait for a place are not among them."
    yield make.gauge("motet_running_batches", help_text, metrics.num_running_batches)
    help_text = (
        "Of these, batches that begin no lines. disk: it has no room for results; registry: Redis is away; gang: none "
        "is there."
    )
    paused = [((reason,), metrics.paused_batches[reason]) for reason in get_args(PauseReason)]
    yield make.gauges("motet_paused_batches", help_text, ("reason",), paused)


def _uploads(metrics: Metrics, make: Families) -> Iterator[Metric]:
    help_text = "From an upload's arrival to its answer, its turn waited for included, of uploads that were accepted."
    yield make.histogram("motet_upload_seconds", help_text, metrics.upload_s)
    yield make.counter("motet_upload_bytes", "Bytes of adapters that were accepted.", metrics.num_upload_bytes)
    if metrics.store_free_bytes is not None:
        help_text = "Free on the disk of the data folder, as of the last half minute; left out while it cannot be read."
        yield make.gauge("motet_store_free_bytes", help_text, metrics.store_free_bytes)
    if metrics.sweep_tried_at is not None:
        help_text = (
            "When this router last swept the store of unused adapters, or found that another one had: every "
            "five minutes, while registry and store can be reached."
        )
        yield make.gauge("motet_sweep_timestamp_seconds", help_text, metrics.sweep_tried_at)
