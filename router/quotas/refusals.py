"""Limits in answers to clients: headers, and refusals as OpenAI words them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ..openai_api.errors import RETRY_AFTER_S, ApiError, insufficient_quota
from .limits import Kind, Level, Limit

Headers = list[tuple[bytes, bytes]]
_KINDS: Final[tuple[Kind, ...]] = ("requests", "tokens", "streams")  # of answers


def headers_of(levels: Sequence[Level]) -> Headers:
    """OpenAI's rate-limit headers. Where tenant, user and key have a limit, of the one that has less left."""
    headers: Headers = []
    for kind in _KINDS:
        level = min((one for one in levels if one.limit.kind == kind), key=lambda one: one.left, default=None)
        if level is None:
            continue
        name = kind.encode()
        headers += [
            (b"x-ratelimit-limit-" + name, b"%d" % level.limit.limit),
            (b"x-ratelimit-remaining-" + name, b"%d" % level.left),
        ]
        if level.limit.is_rate:
            headers.append((b"x-ratelimit-reset-" + name, duration(level.full_in_s).encode()))
    return headers


def zero_refusal(limit: Limit) -> ApiError:
    what = f"{limit.kind} a minute" if limit.is_rate else "answers at once"
    return insufficient_quota(f"This {limit.owner}'s quota of {what} is 0: ask the operators for more.")


def refusal(lacking: Sequence[tuple[Level, int]], levels: Sequence[Level]) -> ApiError:
    """The 429 for a request whose cost some limits do not have. `levels`: of all its limits."""
    level, cost = max(lacking, key=lambda one: one[0].wait_s(one[1]) if one[0].limit.is_rate else 0.0)
    limit, wait_s = level.limit, float(RETRY_AFTER_S)
    if limit.is_rate:
        wait_s = max(level.wait_s(cost), 1e-6)
        message = (
            f"Rate limit reached for this {limit.owner}'s {limit.kind} a minute: limit {limit.limit}, left "
            f"{level.left}, requested {cost}. Try again in {duration(wait_s)}."
        )
        if limit.kind == "tokens":
            message += " The prompt is counted, and max_tokens of each sequence."
    else:
        message = (
            f"This {limit.owner} may have {limit.limit} answers made at once, and has no more left: try again when one "
            "has ended."
        )
    headers = {name.decode(): value.decode() for name, value in headers_of(levels)}
    headers["Retry-After"] = str(max(RETRY_AFTER_S, math.ceil(wait_s)))
    headers["retry-after-ms"] = str(math.ceil(wait_s * 1000))
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 8.64s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{math.ceil(seconds * 100) / 100:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s"
