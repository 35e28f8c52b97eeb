"""How many tokens of prompts a step computes, and how prompts share them: pure policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

_LEAST_PART = 0.25  # prompts get at least this part of the time of a step's decodes

_CPU_INTERVAL_S, _GPU_INTERVAL_S = 0.1, 0.05  # faster than most people read


def token_interval_of(interval_s: float | Literal["auto"], device: str) -> float:
    """Target time of a step with decodes; "auto" depends on the device."""
    if interval_s != "auto":
        return interval_s
    return _CPU_INTERVAL_S if device == "cpu" else _GPU_INTERVAL_S


def tokens_in_time(interval_s: float, decode_s: float, token_s: float, least: int) -> int:
    """How many prompt tokens a step may compute, so that decoding sequences get their next tokens in time.

    `interval_s`: target time of the step. `decode_s`: expected time of its decodes, `token_s`: of a prompt token. Where
    decodes leave hardly any time, prompts get a part of the decodes' time in addition, and at least `least` tokens, so
    that new sequences can start. Sarathi-Serve (arXiv 2403.02310) bounds chunks for the same reason.
    """
    seconds = max(interval_s - decode_s, _LEAST_PART * decode_s)
    return max(least, int(seconds / max(token_s, 1e-9)))


def divide_prompt_tokens(num_left: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each prompt the step computes.

    `num_left`: tokens that each prompt has left, at least one each, the oldest prompt first. `budget`: tokens in all.

    A clearly shorter prompt goes first: it delays the others by a few steps, and they would delay it by hundreds.
    Prompts of about the same length go in the order of arrival. The oldest prompt gets at least half of the budget, so
    no prompt takes more than twice the steps of strict first come, first served. The whole budget is used as long as
    there are tokens.
    """
    granted = [0] * len(num_left)
    if not num_left or budget <= 0:
        return granted
    half = -(-budget // 2)
    granted[0] = min(num_left[0], half)
    budget -= granted[0]
    # Sorted by remaining halves of the budget, rounded up to a power of two: about equal lengths keep their order.
    for number in sorted(range(len(num_left)), key=lambda i: (-(-num_left[i] // half) - 1).bit_length()):
        more = min(num_left[number] - granted[number], budget)
        granted[number] += more
        budget -= more
    return granted
