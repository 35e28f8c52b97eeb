"""How much room of a gang's pool an answer took, as its router can tell: an estimate."""

from __future__ import annotations


def kv_page_ms(num_prompt_tokens: int, num_new_tokens: int, seconds: float, page_tokens: int) -> int:
    """Pages of KV of one sequence times the milliseconds from its first token on, as if its tokens came evenly.

    What the sequence held before its first token, while its prompt was computed, is not in it. A page that it shared
    with others counts in full, and one that it lost for a while, as when it gave way, counts as if it had not.
    """
    first, last = (
        -(-num_tokens // page_tokens) for num_tokens in (num_prompt_tokens, num_prompt_tokens + num_new_tokens)
    )
    return round((first + last) / 2 * max(0.0, seconds) * 1000)
