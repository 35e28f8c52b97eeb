"""Prices of a gang's work in tokens' worth: the work of computing one prompt token."""

from __future__ import annotations

# An output token takes a whole step of its sequence: the price in the paper on virtual token counters (arXiv 2401.00588
# §5.1), and about what providers charge.
OUTPUT_TOKEN = 2.0
# A prompt token whose log-probability is computed also goes through the model's head; others do not.
SCORED_TOKEN = 0.5
# A token whose KV was cached: nothing is computed, but its page is held and read.
CACHED_TOKEN = 0.1


def prompt_price(num_computed: int, num_cached: int = 0) -> float:
    return num_computed + CACHED_TOKEN * num_cached


def load_price(num_pages: int, block_size: int) -> int:
    """Price of loading an adapter. Each of its pages evicts a page of KV, with `block_size` tokens.

    If loads were free, a tenant that uses another adapter in every request would evict the adapters of all others
    while its counter hardly grows.
    """
    return num_pages * block_size
