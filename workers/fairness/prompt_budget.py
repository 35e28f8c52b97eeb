"""How many tokens of prompts a step computes, and how prompts share them: pure policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

_LEAST_SHARE = 0.25  # of the time of a step's decodes, that prompts have at least

_CPU_INTERVAL_S, _GPU_INTERVAL_S = 0.1, 0.05  # faster than most people read


def token_interval_of(interval_s: float | Literal["auto"], device: str) -> float:
    """What a step should take at most in which sequences decode, with what "auto" means on this device."""
    if interval_s != "auto":
        return interval_s
    return _CPU_INTERVAL_S if device == "cpu" else _GPU_INTERVAL_S


def tokens_in_time(interval_s: float, decode_s: float, token_s: float, least: int) -> int:
    """How many tokens of prompts a step may compute, so that those who decode get their next tokens in time.

    `interval_s`: what a step should take. `decode_s`: what its decodes are expected to take of that, `token_s`: a token
    of a prompt. Where decodes leave prompts hardly any time, those have a part of theirs in addition, and at least
    `least` tokens, or nobody new would ever begin. Sarathi-Serve (arXiv 2403.02310) bounds chunks for the same reason.
    """
    seconds = max(interval_s - decode_s, _LEAST_SHARE * decode_s)
    return max(least, int(seconds / max(token_s, 1e-9)))


def share_prompt_tokens(num_left: Sequence[int], budget: int) -> list[int]:
    """How many tokens of each prompt the step computes.

    `num_left`: tokens that each prompt has left, at least one each, the oldest prompt first. `budget`: tokens in all.

    A prompt that is clearly shorter than others goes first, since it holds them up for a step or a few, and they it for
    hundreds; those about as long come as they came. Whoever is oldest has at least half of the budget if it can use it,
    so everybody is oldest in the end, and no prompt takes more than twice the steps that it would take if each came
    wholly before the next. All of the budget is used as long as there are tokens.
    """
    shares = [0] * len(num_left)
    if not num_left or budget <= 0:
        return shares
    half = -(-budget // 2)
    shares[0] = min(num_left[0], half)
    budget -= shares[0]
    # How many times half of the budget a prompt has left, as a power of two: nearly equal ones are not told apart.
    for number in sorted(range(len(num_left)), key=lambda i: (-(-num_left[i] // half) - 1).bit_length()):
        more = min(num_left[number] - shares[number], budget)
        shares[number] += more
        budget -= more
    return shares
