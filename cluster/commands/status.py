"""What `/status` says, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..byte_size import format_byte_size
from .load_lines import load_lines

LEFT_OUT = ("vocab_size", "hidden_size", "eos_token_ids")  # of a gang: facts of the model that its files already state
IN_OTHER_WORDS = {
    "num_pages": "pages",
    "num_threads": "threads",
    "max_num_sequences": "sequences at once, at most",
    "max_tokens_per_step": "tokens of a step, at most",
    "is_fair": "fair order",
    "reasons": "why these sizes",
}


def status_lines(
    status: Mapping[str, Any], before: Mapping[str, Any] | None = None, seconds: float = 0.0
) -> Iterator[str]:
    """One line a fact, sections indented under their name. A key that ends in `_bytes` is shown as a size.

    `before`: the status `seconds` earlier, for rates per second; None: totals since the start.
    """
    shown = _merged(status)
    for report in shown.pop("starts", ()):
        problem = "could not start" if report["has_failed"] else "cannot start yet"
        yield f"a {report['kind']} {problem}: {report['reason']}"
    if (why := shown.pop("taken_back", None)) is not None:
        yield f"the configuration before is back, as the newest one cannot run: {why}"
    yield from _lines(shown, 0, _merged(before or {}), seconds)


def _merged(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without the sum over gangs where it is one gang's own load."""
    shown = dict(status)
    if "load" in shown and "gangs" in shown:
        load = shown.pop("load")
        if len(shown["gangs"]) > 1:
            shown["load of all gangs"] = load
    return shown


def _lines(status: Mapping[str, Any], indent: int, before: Mapping[str, Any], seconds: float) -> Iterator[str]:
    margin = "  " * indent
    for key, value in status.items():
        name = IN_OTHER_WORDS.get(key, key.replace("_", " "))
        if isinstance(value, Mapping):
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
            yield f"{margin}{name}: {_shown(key, value)}"


def _gang(gang: Mapping[str, Any]) -> dict[str, Any]:
    """A gang without the facts of its model; a page's two sizes are one line."""
    shown: dict[str, Any] = {}
    for key, value in gang.items():
        if key == "block_size" and "page_bytes" in gang:
            shown["page"] = f"{value} tokens, {format_byte_size(gang['page_bytes'])}"
        elif key not in LEFT_OUT and not (key == "page_bytes" and "block_size" in gang):
            shown[key] = value
    return shown


def _is_load(value: Mapping[str, Any]) -> bool:
    return "num_steps" in value


def _shown(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key.endswith("_bytes"):
        return format_byte_size(value)
    if isinstance(value, int) and key.startswith("num_"):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
