"""What a gang charges a tenant for what it does for it, in tokens' worth: one token of a prompt that is computed."""

from __future__ import annotations

# A token of an answer takes a whole step of its sequence, in which little else of the device is used: the price that
# virtual token counters were published with (arXiv 2401.00588 §5.1), and about what providers ask.
OUTPUT_TOKEN = 2.0
# A token whose KV was found, or came from a tier: nothing is computed, but its page is held, and looked back at.
CACHED_TOKEN = 0.1


def prompt_price(num_computed: int, num_cached: int = 0) -> float:
    return num_computed + CACHED_TOKEN * num_cached


def load_price(num_pages: int, block_size: int) -> float:
    """Of an adapter that comes into the pool. Each of its pages pushes a page of KV out, with that many tokens.

    Were it free, a tenant that asks for another adapter in every request would evict everybody else's, and would seem
    to have had next to nothing.
    """
    return float(num_pages * block_size)
