"""What one router counts. `exposition/router_families.py` shows it. Nothing of it is by tenant or by adapter."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..adapters.registry.launches import StartReport
from ..workers.wire.messages import FinishReason, RefusalReason, SequenceError
from .http.errors import ApiError

# A histogram without a lock: cheap enough to count every update of a sequence.


class Histogram:
    """Counts values by bucket. One thread writes, and others may read.

    `bounds`: upper bounds of the buckets, ascending; one more bucket has no bound.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it) of each bucket, as Prometheus expects them."""
        total = 0
        cumulative = []
        counts = self._counts[:]  # of one moment: +Inf, which is also their number, is the sum of what stands before it
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], counts, strict=True):
            total += count
            cumulative.append((bound, float(total)))
        return cumulative


# What a router knows of the Ray Serve that runs it.


@dataclass(frozen=True, kw_only=True)
class ServeFacts:
    """The controller's last answer, and whether it answers."""

    status: str  # of the application: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY, …
    num_wanted_gangs: int  # that Serve is to run now
    min_gangs: int  # as `max_gangs`: the wanted number where nothing scales them
    max_gangs: int  # that there may be
    rollout_s: float  # for how long the application has been DEPLOYING; 0: it is not
    is_head_connected: bool  # whether the controller answered the last call


FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUEUE_WAIT_BOUNDS_S = (0.001, *FIRST_TOKEN_BOUNDS_S, 120.0, 300.0, 600.0)  # up to the start of a gang on a new machine
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
UPLOAD_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
LENGTH_BOUNDS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)  # tokens
LOOP_HELD_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

LineResult = Literal["completed", "failed"]
QuotaCall = Literal["prompt", "late", "unanswered", "unreachable"]
PauseReason = Literal["disk", "registry", "gang"]  # why batches that run begin no lines


class Metrics:
    """Written on the router's event loop. Another thread may read it at the same time."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.errors: Counter[tuple[int, str]] = Counter()  # by status and code
        self.finished: Counter[FinishReason] = Counter()  # sequences
        self.num_open_generations = 0
        self.num_resumed_streams = 0  # streams that a client resumed with Last-Event-ID
        self.num_broken_streams = 0  # streams with the status 200 that ended with an error event
        self.refused: Counter[RefusalReason] = Counter()  # requests
        self.num_timed_out = 0  # requests whose answer was not complete in time
        self.num_prompt_tokens = 0
        self.num_cached_prompt_tokens = 0  # of complete answers
        self.num_completion_tokens = 0
        self.prompt_tokens = Histogram(LENGTH_BOUNDS)
        self.completion_tokens = Histogram(LENGTH_BOUNDS)  # of sequences that came to an end
        self.request_s = Histogram(REQUEST_BOUNDS_S)  # of answers that came to an end
        self.upload_s = Histogram(UPLOAD_BOUNDS_S)  # of uploads that were accepted
        self.num_upload_bytes = 0  # of adapters that were stored
        self.batch_lines: Counter[LineResult] = Counter()  # whose results are written
        self.num_running_batches = 0
        self.paused_batches: Counter[PauseReason] = Counter()
        self.store_free_bytes: int | None = None  # on the disk of the adapters, a while ago; None: it cannot be read
        self.redis_memory: tuple[int, int] | None = None  # used bytes, and their bound or 0; a while ago
        self.quota_calls: Mapping[QuotaCall, int] = {}  # how Redis has answered messages about quotas
        self.starts: Sequence[StartReport] | None = None  # of replicas that cannot start; None: Redis is away
        self.taken_back: str | None = None  # why a newer configuration of the application was; None: none was
        self.serve: ServeFacts | None = None  # a while ago; None: its controller has not answered yet
        self.sweep_tried_at: float | None = None  # time.time() when a sweep was made, or found not to be due
        self.first_token_s = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.queue_wait_s = Histogram(QUEUE_WAIT_BOUNDS_S)  # of sequences that got a first token
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)  # between updates of a sequence
        self.loop_held_s = Histogram(LOOP_HELD_BOUNDS_S)  # written by the watchdog of the loop
        self.loop_held_cpu_s = Histogram(LOOP_HELD_BOUNDS_S)  # likewise
        self.num_held_body_bytes = 0  # of JSON bodies that arrive or wait to be decoded
        self.edge_refused: Callable[[], Mapping[str, int]] = dict  # by HAProxy, by reason, while this router watches it
        self.dropped_log_lines: Callable[[], int] = lambda: 0  # set by the log writer
        self.ledger: Callable[[], tuple[int, float]] = lambda: (
            0,
            0.0,
        )  # bytes that it waits with, and how long (s)
        self.last_token_at: float | None = None  # time.perf_counter()

    def count_failure(self, error: SequenceError) -> None:
        """Counts a request that failed with this error."""
        if error.kind == "overloaded" and error.reason is not None:
            self.refused[error.reason] += 1
        self.num_timed_out += error.kind == "timeout"

    def count_error(self, error: ApiError) -> None:
        """Counts an error that a client was sent."""
        self.errors[error.status_code, error.detail.code or ""] += 1
