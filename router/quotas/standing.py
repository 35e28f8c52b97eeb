"""How a request stands with its quotas: what is left, as headers and as a refusal in OpenAI's manner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..openai_api.errors import RETRY_AFTER_S, ApiError, insufficient_quota
from .bounds import Bounds, Kind
from .gcra import SLACK_US, Bucket, remaining, wait_us
from .quota_scripts import Outcome

Headers = list[tuple[bytes, bytes]]
Costs = Mapping[Kind, int]
_KINDS: tuple[Kind, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Standing:
    """At the moment `now_us`. `buckets`, and `limits` that they have: one for each of `bounds.rates`, whose limits they
    are, or the part of them that one router may let through. Streams: those that are made now.
    """

    bounds: Bounds
    now_us: float
    buckets: Sequence[Bucket]
    limits: Sequence[float]
    tenant_streams: int
    key_streams: int

    def left(self, index: int) -> int:
        return remaining(self.buckets[index], self.now_us, self.limits[index])

    def full_in_s(self, index: int) -> float:
        return self.buckets[index].drained(self.now_us).backlog_us / 1e6


def headers_of(standing: Standing) -> Headers:
    """OpenAI's rate-limit headers. Where tenant and key are both bound, of the one that has less left."""
    found: Headers = []
    rates = standing.bounds.rates
    for kind in _KINDS:
        mine = [index for index, rate in enumerate(rates) if rate.kind == kind]
        if not mine:
            continue
        index = min(mine, key=standing.left)
        name = kind.encode()
        found += [
            (b"x-ratelimit-limit-" + name, b"%d" % rates[index].limit),
            (b"x-ratelimit-remaining-" + name, b"%d" % standing.left(index)),
            (b"x-ratelimit-reset-" + name, duration(standing.full_in_s(index)).encode()),
        ]
    streams = _tightest_streams(standing)
    if streams is not None:
        limit, count = streams
        found += [
            (b"x-ratelimit-limit-streams", b"%d" % limit),
            (b"x-ratelimit-remaining-streams", b"%d" % max(0, limit - count)),
        ]
    return found


def rate_refusal(standing: Standing, costs: Costs) -> ApiError | None:
    """The 429 for what would cost so much, by kind; None: no rate refuses it."""
    waits = _waits(standing, costs)
    return _refused_by(standing, costs, waits) if any(wait > SLACK_US for wait in waits.values()) else None


def refusal(standing: Standing, costs: Costs, outcome: Outcome) -> ApiError:
    """The 429 for what was not admitted."""
    if outcome is Outcome.RATE_EXCEEDED:
        return _refused_by(standing, costs, _waits(standing, costs))
    bounds = standing.bounds
    is_tenant = bounds.tenant_streams is not None and standing.tenant_streams >= bounds.tenant_streams
    owner, limit = ("tenant", bounds.tenant_streams) if is_tenant else ("key", bounds.key_streams)
    if not limit:
        return _none_at_all("answers at once", owner)
    message = f"This {owner} may have {limit} answers made at once, and has no more left: try again when one has ended."
    return _too_many(message, RETRY_AFTER_S, headers_of(standing))


def _waits(standing: Standing, costs: Costs) -> dict[int, float]:
    """Microseconds until each rate that is asked for anything would admit it; infinite: never."""
    return {
        index: wait_us(standing.buckets[index], standing.now_us, cost, limit) if limit > 0 else math.inf
        for index, (rate, limit) in enumerate(zip(standing.bounds.rates, standing.limits, strict=True))
        if (cost := costs.get(rate.kind, 0))
    }


def _refused_by(standing: Standing, costs: Costs, waits: Mapping[int, float]) -> ApiError:
    index = max(waits, key=lambda one: waits[one])
    rate, wait_s = standing.bounds.rates[index], max(waits[index], 1.0) / 1e6
    if wait_s == math.inf:
        return _none_at_all(f"{rate.kind} a minute", rate.owner)
    message = (
        f"Rate limit reached for this {rate.owner}'s {rate.kind} a minute: limit {rate.limit}, left "
        f"{standing.left(index)}, asked for {costs[rate.kind]}. Try again in {duration(wait_s)}."
    )
    if rate.kind == "tokens":
        message += " The prompt is asked for, and max_tokens of each sequence."
    return _too_many(message, wait_s, headers_of(standing))


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 8.64s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 100) / 100:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"


def _tightest_streams(standing: Standing) -> tuple[int, int] | None:
    bounds, found = standing.bounds, []
    if bounds.tenant_streams is not None:
        found.append((bounds.tenant_streams, standing.tenant_streams))
    if bounds.key_streams is not None:
        found.append((bounds.key_streams, standing.key_streams))
    return min(found, key=lambda one: one[0] - one[1], default=None)


def _too_many(message: str, wait_s: float, headers: Headers) -> ApiError:
    told = {name.decode(): value.decode() for name, value in headers}
    told["Retry-After"] = str(max(RETRY_AFTER_S, math.ceil(wait_s)))
    told["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    return ApiError(429, message, code="rate_limit_exceeded", headers=told)


def _none_at_all(what: str, owner: str) -> ApiError:
    message = f"This {owner}'s quota of {what} is 0: ask who runs this motet for more."
    return insufficient_quota(message)
