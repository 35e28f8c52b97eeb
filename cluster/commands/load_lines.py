"""The load of a gang, or of all, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..byte_size import format_byte_size


def load_lines(load: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> Iterator[str]:
    """Lines for an `EngineLoad` of `/status`.

    `before`: the load `seconds` earlier, for rates; None: the lines have counts since the start.
    """
    load = {field: value or 0 for field, value in load.items()}

    def count(field: str) -> float:
        return float(load.get(field, 0))

    def rate(field: str, what: str) -> str:
        if before is None or seconds <= 0:
            return f"{count(field):,.0f} {what}"
        return f"{max(0.0, count(field) - (before.get(field) or 0)) / seconds:,.1f} {what}"

    every = "" if before is None or seconds <= 0 else " a second"
    waiting = f"{count('num_waiting'):,.0f} waiting"
    if count("num_waiting_for_adapters"):
        waiting += f", {count('num_waiting_for_adapters'):,.0f} of them for adapters"
    if count("oldest_waiting_s"):
        waiting += f", the oldest for {count('oldest_waiting_s'):.1f} s"
    yield f"sequences: {count('num_running'):,.0f} running, {waiting}"
    yield f"queued tokens: {count('num_queued_tokens'):,.0f}"
    yield (
        f"pages: {count('num_free_pages'):,.0f} of {count('num_pages'):,.0f} free; "
        f"kept KV {count('num_prefix_pages'):,.0f} ({count('num_idle_prefix_pages'):,.0f} idle); "
        f"adapters {count('num_adapter_pages'):,.0f} ({count('num_idle_adapter_pages'):,.0f} idle)"
    )
    tiers = f"{count('num_host_pages'):,.0f} in host memory, {count('num_disk_pages'):,.0f} on disk"
    yield f"pages of KV behind them: {tiers}"
    packed = format_byte_size(int(count("host_adapter_bytes")))
    there = f"{count('num_resident_adapters'):,.0f} there, {count('num_coming_adapters'):,.0f} coming"
    yield f"adapters: {there}; {packed} packed in host memory"
    yield f"prompt tokens not computed again (prefix cache): {_hit_rate(load)}"
    yield f"tokens{every}: {rate('num_generated_tokens', 'generated')}, {rate('num_computed_tokens', 'computed')}"
    yield (
        f"copies{every}: {rate('num_pages_out', 'pages of KV to host memory')}, {rate('num_pages_in', 'back')}; "
        f"{rate('num_move_failures', 'failed')}"
    )
    yield (
        f"adapter loads{every}: {rate('num_adapter_loads', 'adapters')}, "
        f"{rate('num_adapter_reads', 'of them from the store')}; {rate('num_loaded_pages', 'pages')}"
    )
    yield (
        f"evictions{every}: {rate('num_prefix_evictions', 'pages of KV')}, {rate('num_adapter_evictions', 'adapters')}"
    )
    yield f"preemptions{every}: {rate('num_preemptions', 'sequences')}"


def _hit_rate(load: Mapping[str, Any]) -> str:
    """The share of the tokens of prompts that came from the prefix cache.

    A decoding sequence computes the token that it generated last, so the other computed tokens were those of prompts.
    """
    num_cached = load.get("num_cached_tokens", 0)
    num_computed = max(0, load.get("num_computed_tokens", 0) - load.get("num_generated_tokens", 0))
    if not num_cached + num_computed:
        return "-"
    share = num_cached / (num_cached + num_computed)
    return f"{share:.1%} of {num_cached + num_computed:,.0f} since the start"
