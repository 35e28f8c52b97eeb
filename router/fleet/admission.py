"""Whether a new sequence can be served in time: a pure policy of what a router knows at that moment.

A sequence is refused at once if it would have to be given up later, so that its client can go elsewhere or retry. It is
never refused for lack of knowledge: without a report of waiting sequences a gang's queue counts as empty, and a
sequence that may end at any token is expected to take no more than one.

A tenant's latency objective is about first tokens, which queues delay by a time that can be predicted. Only a queue is
a reason to refuse for it. A prompt that is too long for the objective, or an adapter that loads too slowly, would be as
late the next time; and where no sequence waits, only an admitted one can correct an estimate that is too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...workers.wire.messages import SequenceError
from .affinity import GangView, RoutingConfig, RoutingRequest, choose_gang

SLACK = 2.0  # a sequence is given up after this many times the longest expected wait
_DOUBT = 1.25  # a queue may take this many times what is expected; under overload all admitted requests are near limits
_QUEUES_BEFORE_REFUSAL = 2.0  # times the queue that calls for another gang, as the autoscaler must see it for a while


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """When a request is refused. Defaults and bounds stand with motet's settings."""

    max_queue_wait_s: float  # that a sequence may be expected to wait for its turn; 0: any
    max_gangs: int  # the autoscaler's
    queued_tokens_per_gang: int  # the autoscaler's: a longer queue calls for another gang, if there may be more
    latency_objectives_s: tuple[tuple[str, float], ...]  # (tenant, until the first token); others have none


@dataclass(frozen=True)
class TimeLimit:
    """How long a request's client waits, and for how many tokens."""

    timeout_s: float | None = None  # until the last token; None: as long as it takes
    num_new_tokens: int = 1  # that the sequence generates at least
    has_begun: bool = False  # it is being answered already, as was proved: it is not refused, however late


@dataclass(frozen=True)
class Expectation:
    """How long a sequence is expected to take at one gang, in seconds."""

    queue_s: float  # until all sequences that wait there have begun
    answer_s: float  # until its last token, if the queue takes as long as it well may
    alone_s: float  # until its last token, if no sequence waited there


@dataclass(frozen=True)
class Admitted:
    gang_key: str
    wait_s: float | None  # the sequence is to be given up if it still waits after this; None: never


def expect(request: RoutingRequest, gang: GangView, num_new_tokens: int) -> Expectation:
    """How long the sequence is expected to take at the gang, by the costs that were measured there.

    Its adapter is loaded while it waits. Its own prompt costs the time by which it makes steps longer. A token of the
    queue costs more, since that includes the time until running sequences end.
    """
    costs = gang.costs
    queue_s = gang.num_queued_tokens * costs.s_per_waiting_token if gang.num_waiting else 0.0
    load_s = 0.0 if gang.has_adapter else request.num_adapter_pages * costs.s_per_page
    num_own_tokens = max(1, request.num_tokens - gang.num_cached_tokens)
    own_s = num_own_tokens * costs.s_per_token + num_new_tokens * costs.s_per_step
    return Expectation(queue_s, max(_DOUBT * queue_s, load_s) + own_s, load_s + own_s)


def admit(
    request: RoutingRequest,
    limit: TimeLimit,
    gangs: Sequence[GangView],
    routing: RoutingConfig,
    config: AdmissionConfig,
    objective_s: float | None = None,
) -> Admitted | SequenceError:
    """The gang to send a new sequence to, or why no gang can serve it in time. `gangs` are not empty.

    `objective_s`: of its tenant, until its first token; None: its tenant has none.

    The gang is the one that `choose_gang` chooses; if it would be late there, the one that `choose_gang` chooses among
    those where it would not be. A gang that holds the sequence already takes it in any case.
    """
    chosen = choose_gang(request, gangs, routing)
    assert chosen is not None
    by_key = {gang.key: gang for gang in gangs}
    refusals: dict[str, SequenceError] = {}
    for key in (chosen, *(by_key.keys() - {chosen})):
        refusal = _refusal(request, limit, by_key[key], len(gangs), config, objective_s)
        if refusal is None and key == chosen:
            return Admitted(key, _wait_s(request, by_key[key], config))
        if refusal is not None:
            refusals[key] = refusal
    in_time = [gang for gang in gangs if gang.key not in refusals]
    if not in_time:
        return min(
            refusals.values(), key=lambda error: math.inf if error.retry_after_s is None else error.retry_after_s
        )
    other = choose_gang(request, in_time, routing)
    assert other is not None
    return Admitted(other, _wait_s(request, by_key[other], config))


def _refusal(
    request: RoutingRequest,
    limit: TimeLimit,
    gang: GangView,
    num_gangs: int,
    config: AdmissionConfig,
    objective_s: float | None,
) -> SequenceError | None:
    if gang.has_sequence:
        return None
    expectation = expect(request, gang, limit.num_new_tokens)
    if limit.timeout_s is not None and expectation.answer_s > limit.timeout_s:
        is_hopeless = expectation.alone_s > limit.timeout_s  # also without a queue: a retry cannot succeed
        queue = (
            "even without a queue" if is_hopeless else f"as {_readable(expectation.queue_s)} are expected in the queue"
        )
        needed_s = expectation.alone_s if is_hopeless else expectation.answer_s
        remaining_time = (
            f"{_readable(limit.timeout_s)} of its timeout are left"
            if limit.timeout_s
            else "nothing of its timeout is left"
        )
        return SequenceError(
            "overloaded",
            f"the answer needs up to {_readable(needed_s)}, {queue}, and {remaining_time}",
            None if is_hopeless else expectation.queue_s,
            "timeout",
        )
    may_grow = num_gangs < config.max_gangs
    if may_grow and gang.num_queued_tokens <= _QUEUES_BEFORE_REFUSAL * config.queued_tokens_per_gang:
        return None
    first = expect(request, gang, num_new_tokens=1)
    if objective_s is not None and first.answer_s > max(objective_s, first.alone_s):
        return SequenceError(
            "overloaded",
            f"the first token needs up to {_readable(first.answer_s)}, as {_readable(first.queue_s)} are expected in "
            f"the queue, and the tenant's latency objective is {objective_s:g} s",
            first.queue_s,
            "objective",
        )
    if config.max_queue_wait_s and expectation.queue_s > config.max_queue_wait_s:
        return SequenceError(
            "overloaded",
            f"the request is expected to wait {_readable(expectation.queue_s)} for its turn, and at most "
            f"{config.max_queue_wait_s:g} s are accepted",
            expectation.queue_s,
            "wait",
        )
    return None


def _wait_s(request: RoutingRequest, gang: GangView, config: AdmissionConfig) -> float | None:
    """How long the sequence may wait at the gang before it is given up: always longer than is expected now."""
    if not config.max_queue_wait_s or gang.has_sequence:
        return None
    return SLACK * max(config.max_queue_wait_s, expect(request, gang, 1).queue_s)


def _readable(seconds: float) -> str:
    """A time for people to read, which is never rounded to 0.0 s."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
