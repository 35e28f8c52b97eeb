"""How the tokens of prompts that a step may compute are shared out among prompts: a pure policy."""

from __future__ import annotations

from collections.abc import Sequence


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
