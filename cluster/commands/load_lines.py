"""The load of a gang, or of all, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..byte_size import format_byte_size


def load_lines(load: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> Iterator[str]:
    """Lines for an `EngineLoad` of `/status`.

    `before`: the same `seconds` earlier, for what happens in a second; None: what has happened since the start.
    """
    load = {field: value or 0 for field, value in load.items()}

    def count(field: str) -> float:
        return float(load.get(field, 0))

    def told(field: str, what: str) -> str:
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
        f"pages: {count('num_pages'):,.0f}: {count('num_free_pages'):,.0f} free, "
        f"{count('num_prefix_pages'):,.0f} of kept KV ({count('num_idle_prefix_pages'):,.0f} idle), "
        f"{count('num_adapter_pages'):,.0f} of adapters ({count('num_idle_adapter_pages'):,.0f} idle)"
    )
    behind = f"{count('num_host_pages'):,.0f} in host memory, {count('num_disk_pages'):,.0f} on disk"
    yield f"pages of KV behind them: {behind}"
    packed = format_byte_size(int(count("host_adapter_bytes")))
    there = f"{count('num_resident_adapters'):,.0f} there, {count('num_coming_adapters'):,.0f} coming"
    yield f"adapters: {there}; {packed} packed in host memory"
    yield f"prompt tokens found: {_hit_rate(load)}"
    yield f"tokens{every}: {told('num_generated_tokens', 'generated')}, {told('num_computed_tokens', 'computed')}"
    yield (
        f"copies{every}: {told('num_pages_out', 'pages of KV out')}, {told('num_pages_in', 'in')}, "
        f"{told('num_loaded_pages', 'of adapters in')}; {told('num_move_failures', 'failed')}"
    )
    yield (
        f"evictions{every}: {told('num_prefix_evictions', 'pages of KV')}, "
        f"{told('num_adapter_evictions', 'adapters')}; {told('num_adapter_loads', 'adapters loaded')}, "
        f"{told('num_adapter_reads', 'of them from the store')}"
    )
    yield f"preemptions{every}: {told('num_preemptions', 'sequences')}"


def _hit_rate(load: Mapping[str, Any]) -> str:
    """Since the start. A decoding sequence computes the token that it generated last: what is beyond were prompts'."""
    num_cached = load.get("num_cached_tokens", 0)
    num_computed = max(0, load.get("num_computed_tokens", 0) - load.get("num_generated_tokens", 0))
    if not num_cached + num_computed:
        return "-"
    return f"{num_cached / (num_cached + num_computed):.1%} of {num_cached + num_computed:,.0f}"
