"""What `/status` says, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..settings.setting_field import format_byte_size

# The load of a gang, or of all, as lines for a person.


def load_lines(load: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> Iterator[str]:
    """Lines for an `EngineLoad` of `/status`.

    `before`: the load `seconds` earlier, for rates; None: the lines have counts since the start.
    """
    load = {field: value or 0 for field, value in load.items()}

    def count(field: str) -> float:
        return float(load.get(field, 0))

    def rate(field: str, unit: str) -> str:
        if before is None or seconds <= 0:
            return f"{count(field):,.0f} {unit}"
        return f"{max(0.0, count(field) - (before.get(field) or 0)) / seconds:,.1f} {unit}"

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


LEFT_OUT = ("vocab_size", "hidden_size", "eos_token_ids")  # of a gang: facts of the model that its files already state
IN_OTHER_WORDS = {
    "num_pages": "pages",
    "num_threads": "threads",
    "max_num_sequences": "sequences at once, at most",
    "max_tokens_per_step": "tokens of a step, at most",
    "is_fair": "fair order",
    "num_state_pages": "pages of a sequence's recurrent state",
    "reasons": "why these sizes",
}


def status_lines(
    status: Mapping[str, Any], before: Mapping[str, Any] | None = None, seconds: float = 0.0
) -> Iterator[str]:
    """One line a fact, sections indented under their name. A key that ends in `_bytes` is shown as a size.

    `before`: the status `seconds` earlier, for rates per second; None: totals since the start.
    """
    sections = _merged(status)
    for report in sections.pop("starts", ()):
        problem = "could not start" if report["has_failed"] else "cannot start yet"
        yield f"a {report['kind']} {problem}: {report['reason']}"
    if (why := sections.pop("taken_back", None)) is not None:
        yield f"the configuration before is back, as the newest one cannot run: {why}"
    yield from _lines(sections, 0, _merged(before or {}), seconds)


def _merged(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without the sum over gangs where it is one gang's own load."""
    sections = dict(status)
    if "load" in sections and "gangs" in sections:
        load = sections.pop("load")
        if len(sections["gangs"]) > 1:
            sections["load of all gangs"] = load
    return sections


def _lines(status: Mapping[str, Any], indent: int, before: Mapping[str, Any], seconds: float) -> Iterator[str]:
    margin = "  " * indent
    for key, value in status.items():
        name = IN_OTHER_WORDS.get(key, key.replace("_", " "))
        if isinstance(value, Mapping) and value:
            yield f"{margin}{name}"
            if _is_load(value):
                for line in load_lines(value, before.get(key), seconds):
                    yield f"{margin}  {line}"
            else:
                yield from _lines(value, indent + 1, before.get(key) or {}, seconds)
        elif isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(v, Mapping) for v in value):
            earlier = {item.get("gang_id"): item for item in before.get(key) or ()}
            for number, item in enumerate(value, start=1):
                yield f"{margin}{name} {number} of {len(value)}"
                yield from _lines(_gang(item), indent + 1, earlier.get(item.get("gang_id"), {}), seconds)
        else:
            yield f"{margin}{name}: {_text(key, value)}"


def _gang(gang: Mapping[str, Any]) -> dict[str, Any]:
    """A gang without the facts of its model; a page's two sizes are one line."""
    facts: dict[str, Any] = {}
    for key, value in gang.items():
        if key == "block_size" and "page_bytes" in gang:
            facts["page"] = f"{value} tokens, {format_byte_size(gang['page_bytes'])}"
        elif key == "num_state_pages" and not value:
            continue
        elif key not in LEFT_OUT and not (key == "page_bytes" and "block_size" in gang):
            facts[key] = value
    return facts


def _is_load(value: Mapping[str, Any]) -> bool:
    return "num_steps" in value


def _text(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("_bytes"):
        return format_byte_size(value)
    if isinstance(value, int) and key.startswith("num_"):
        return f"{value:,}"
    if isinstance(value, list | Mapping):
        return ", ".join(map(str, value)) or "none"
    return str(value)
